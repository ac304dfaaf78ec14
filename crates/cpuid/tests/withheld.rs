//! Features that a host may have and no guest is told of, in any list: what they change is not followed
//! everywhere, so that half of the machine would know them and half would not.

mod hosts;

use gannet_cpuid::{GuestCpuid, HostFacts, Supported};
use hosts::{entry, intel, leak};
use x86::Cr4;
use x86::cpuid::{Feature, feature};

/// Linear-address masking changes what CR3 may hold and which addresses are canonical: for KVM_SET_SREGS,
/// RSM, the emulator and the walks of tables (SDM vol. 1 §3.3.7.1.2).
const WITHHELD: [(Feature, Cr4); 1] = [(feature::LAM, Cr4::LAM_SUP)];

/// The Intel host of the tests with these features as well.
fn host(leaf: u32, subleaf: u32) -> [u32; 4] {
    let mut answer = intel(leaf, subleaf);
    for (withheld, _) in WITHHELD {
        if (withheld.leaf, withheld.subleaf) == (leaf, subleaf) {
            // LAM is in EAX of leaf 7.1.
            answer[0] |= withheld.mask();
        }
        if leaf == 7 && subleaf == 0 {
            answer[0] = answer[0].max(1);
        }
    }
    answer
}

#[test]
fn what_is_withheld_is_in_no_list() {
    let supported = leak(Supported::read(host, &HostFacts::default()).expect("a table"));
    for (withheld, bit) in WITHHELD {
        assert!(withheld.is_in(&host(withheld.leaf, withheld.subleaf)), "the test's host has it");
        assert!(!supported.has(withheld), "KVM_GET_SUPPORTED_CPUID's words");
        let told = entry(supported.entries(), withheld.leaf, withheld.subleaf).answer();
        assert!(!withheld.is_in(&told), "KVM_GET_SUPPORTED_CPUID");
        assert!(!supported.cr4().intersects(bit), "CR4 of the host");
        // A VMM that tells its guest of it all the same.
        let mut entries = supported.entries().to_vec();
        for e in &mut entries {
            if (e.leaf, e.index) == (withheld.leaf, withheld.subleaf) {
                e.eax |= withheld.mask();
            }
        }
        let mut guest = GuestCpuid::new(supported);
        guest.set(&entries, supported, false).expect("accepted");
        assert!(!guest.cr4_allowed().intersects(bit), "CR4 of a guest");
    }
}
