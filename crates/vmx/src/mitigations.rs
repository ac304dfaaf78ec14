//! What is done at VM entry and exit against the CPU's leaks.
