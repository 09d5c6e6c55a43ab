"""Devices and kernels that are not here: a simulated GPU, Triton's interpreter, references of flash attention."""
