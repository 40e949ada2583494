"""What all workers have in common, wherever they run: how calls get to them, what they make of one, and idle pools."""
