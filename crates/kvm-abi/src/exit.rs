//! Why KVM_RUN returned, and what the VMM asked when it called. The run loop speaks of it in neutral
//! form; `run_page` writes the one into the shared page and reads the other from it (KVM API §5).

pub use vcpu::run::user_exit::*;
