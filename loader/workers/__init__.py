"""The common base of all workers: dispatching calls, running them, and keeping idle workers."""
