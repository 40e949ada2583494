"""The common base of workers, wherever they run: calls, the settings of the program, and idle pools."""
