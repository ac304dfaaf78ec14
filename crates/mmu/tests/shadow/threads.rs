//! Many CPUs at once.
