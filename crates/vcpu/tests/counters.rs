//! The host's performance counters while a guest runs: what perf says.

mod rig;

use gannet_vcpu::{RunInput, UserExit};
use host::std_port::test::{perf_stopped, set_perf_guest};
use rig::vmx::{exit, shutdown, vcpu};
use x86::vmcs::{EntryControls, ExitReason, field};

#[test]
fn counters_that_are_not_to_count_a_guest_are_off_at_every_entry_and_on_again_after() {
    let mut v = vcpu();
    for wanted in [None, Some(0x7_0000_0003), Some(1), None] {
        set_perf_guest(wanted);
        let script = &mut v.backend().cpu().inner().vmx;
        for _ in 0..2 {
            script.then(move |vmcs, gprs| {
                let controls = EntryControls::from_bits_retain(vmcs.get(field::ENTRY_CONTROLS));
                let loads = controls.contains(EntryControls::LOAD_PERF_GLOBAL_CTRL);
                let value = vmcs.get(field::GUEST_PERF_GLOBAL_CTRL);
                assert_eq!(loads.then_some(value), wanted);
                assert_eq!(perf_stopped(), i32::from(wanted.is_some()));
                exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
            });
        }
        script.then(shutdown);
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        assert_eq!(perf_stopped(), 0, "{wanted:?}");
    }
}
