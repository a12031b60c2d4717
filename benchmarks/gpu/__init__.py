"""What one GPU can show: kernels, memory, speed and whole runs, measured part by part."""
