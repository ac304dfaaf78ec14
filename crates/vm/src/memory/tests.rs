//! Behaviour of a VM's memory, against the std port of `host`.
