//! Operation budgets and behaviour of the run loop on the model CPU.
