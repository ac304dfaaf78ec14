//! What VMX keeps per physical CPU: the VMXON region, address-space ids, the active VMCSs.
