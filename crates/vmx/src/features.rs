//! What this CPU offers of VMX: the capability MSRs, read once at load (SDM vol. 3 appendix A).
