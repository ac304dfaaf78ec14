//! SPEC_CTRL, PRED_CMD and FLUSH_CMD: the guest's own, as far as its CPUID and the VMM's filter allow.
//!
//! The two commands hold no value: their writes go to the hardware, their reads fault there.
//!
//! SPEC_CTRL has to be read after every exit once the guest may write it unseen, and that RDMSR costs
//! more than the rest of an exit. So its accesses exit until the guest has written something other
//! than zero; most guests never do. The world switch exchanges the two values and reads the guest's
//! ([`VmxSwitch`]), which is therefore the newest whenever the guest is not running.
//!
//! What a write may hold is the CPU's to check then: a guest can set what the CPU knows, and not only
//! what it was offered.

use cpu::{Cpu, VmxSwitch};
use x86::{Directions, msr};

use crate::{permission::SPECULATION, state::Vmx};

impl<C: Cpu> Vmx<C> {
    /// The guest's SPEC_CTRL.
    pub(crate) fn spec_ctrl(&self) -> u64 {
        self.switch.guest_spec_ctrl
    }

    /// Sets the guest's SPEC_CTRL. Only a CPU that has it gets another value than zero to load.
    pub(crate) fn set_spec_ctrl(&mut self, value: u64) {
        // Without the MSR the switch does not touch it: nothing is kept that nobody would load.
        if !self.features.spec_ctrl {
            return;
        }
        self.switch.guest_spec_ctrl = value;
        // Once: from here on the value is read after each exit, until the next reset.
        if value != 0 && !self.cold.spec_ctrl_used {
            self.cold.spec_ctrl_used = true;
            self.pass_speculation();
        }
    }

    /// The power-up value, also after INIT as in stock KVM; who comes next may never use it.
    pub(crate) fn reset_spec_ctrl(&mut self) {
        // What the guest may do without an exit shrinks with it: the value is 0 again, and known.
        self.switch.guest_spec_ctrl = 0;
        self.cold.spec_ctrl_used = false;
        self.pass_speculation();
    }

    /// Lets the guest have what it may have: its CPUID, the VMM's filter or what it has written has
    /// changed.
    pub(crate) fn pass_speculation(&mut self) {
        let limits = self.cold.limits;
        let (reads, writes) = (Directions::READS, Directions::WRITES);
        // Reads fault in the guest as they do on a CPU: there is nothing to read.
        self.msr_map().intercept(msr::PRED_CMD, reads | writes.when(!limits.pred_cmd));
        self.msr_map().intercept(msr::FLUSH_CMD, reads | writes.when(!limits.flush_cmd));
        let own = limits.spec_ctrl && self.features.spec_ctrl && self.cold.spec_ctrl_used;
        self.msr_map().intercept(msr::SPEC_CTRL, Directions::all().when(!own));
        // The filter closes what CPUID has opened, and never the other way.
        for (msr, denied) in SPECULATION.into_iter().zip(self.cold.speculation_denied) {
            let exits = self.msr_map().intercepted(msr);
            self.msr_map().intercept(msr, exits | denied);
        }
        // By the map as it came out: the filter may have closed the writes.
        let exits = self.msr_map().intercepted(msr::SPEC_CTRL);
        self.switch.flags &= !VmxSwitch::READ_SPEC_CTRL;
        if !exits.contains(writes) {
            self.switch.flags |= VmxSwitch::READ_SPEC_CTRL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::Features;
    use backend::{Backend, GuestLimits, Msrs, Permissions};
    use cpu::Model;
    use x86::Reset;

    const IBRS: u64 = 1;
    const OFFERED: GuestLimits = GuestLimits {
        cr4_allowed: x86::Cr4::empty(),
        spec_ctrl: true,
        pred_cmd: true,
        flush_cmd: true,
        tsc_aux: false,
        xsave: false,
        invpcid: false,
        rdrand: false,
        rdseed: false,
        vmx: false,
        rtm: false,
        wide_sysenter: false,
        efer_allowed: 0,
        maxphyaddr: 0,
        svm_features: 0,
    };
    const EXIT: Directions = Directions::all();
    const PASS: Directions = Directions::empty();
    const WRITES_PASS: Directions = Directions::READS;

    fn vmx() -> Vmx<Model> {
        let features = Features { spec_ctrl: true, ..Features::default() };
        let mut vmx = Vmx::new(Model::default(), features).unwrap();
        vmx.set_limits(OFFERED);
        vmx
    }

    fn exits(vmx: &Vmx<Model>) -> [Directions; 3] {
        SPECULATION.map(|msr| vmx.msr_map().intercepted(msr))
    }

    fn is_read(vmx: &Vmx<Model>) -> bool {
        vmx.switch.flags & VmxSwitch::READ_SPEC_CTRL != 0
    }

    #[test]
    fn the_first_value_other_than_zero_makes_spec_ctrl_the_guests() {
        let mut vmx = vmx();
        vmx.set_msr(msr::SPEC_CTRL, 0).unwrap();
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (EXIT, false));
        vmx.set_msr(msr::SPEC_CTRL, IBRS).unwrap();
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (PASS, true));
        // And it stays, for the guest may write again at any time.
        vmx.set_msr(msr::SPEC_CTRL, 0).unwrap();
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (PASS, true));
        assert_eq!(vmx.msr(msr::SPEC_CTRL), Ok(0));
    }

    #[test]
    fn commands_are_write_only_and_need_their_features() {
        let mut vmx = vmx();
        assert_eq!(exits(&vmx), [EXIT, WRITES_PASS, WRITES_PASS]);
        vmx.set_limits(GuestLimits { pred_cmd: false, ..OFFERED });
        assert_eq!(exits(&vmx), [EXIT, EXIT, WRITES_PASS]);
        vmx.set_limits(GuestLimits { flush_cmd: false, ..OFFERED });
        assert_eq!(exits(&vmx), [EXIT, WRITES_PASS, EXIT]);
    }

    #[test]
    fn another_cpuid_takes_spec_ctrl_away_and_gives_it_back() {
        let mut vmx = vmx();
        vmx.set_msr(msr::SPEC_CTRL, IBRS).unwrap();
        vmx.set_limits(GuestLimits::default());
        assert_eq!((exits(&vmx), is_read(&vmx)), ([EXIT; 3], false));
        // What the guest runs with is still what was written.
        assert_eq!(vmx.msr(msr::SPEC_CTRL), Ok(IBRS));
        vmx.set_limits(OFFERED);
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (PASS, true));
    }

    #[test]
    fn the_filter_wins_whenever_it_comes() {
        let writes_of_spec_ctrl = |msr| Directions::WRITES.when(msr == msr::SPEC_CTRL);
        // After the first write, before it, and before another CPUID.
        let mut vmx = vmx();
        vmx.set_msr(msr::SPEC_CTRL, IBRS).unwrap();
        vmx.set_msr_filter(writes_of_spec_ctrl);
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (Directions::WRITES, false));
        vmx.reset(Reset::PowerUp);
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (EXIT, false));
        vmx.set_msr(msr::SPEC_CTRL, IBRS).unwrap();
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (Directions::WRITES, false));
        vmx.set_limits(OFFERED);
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (Directions::WRITES, false));
        // Reads alone denied: writes pass, and have to be read.
        vmx.set_msr_filter(|msr| match msr {
            msr::SPEC_CTRL => Directions::READS,
            msr::PRED_CMD => Directions::WRITES,
            _ => Directions::empty(),
        });
        assert_eq!(exits(&vmx), [Directions::READS, EXIT, WRITES_PASS]);
        assert!(is_read(&vmx));
        vmx.set_msr_filter(|_| Directions::empty());
        assert_eq!(exits(&vmx), [PASS, WRITES_PASS, WRITES_PASS]);
    }

    #[test]
    fn reset_and_init_clear_it_and_watch_again() {
        for reset in [Reset::PowerUp, Reset::Init] {
            let mut vmx = vmx();
            vmx.set_msr(msr::SPEC_CTRL, IBRS).unwrap();
            vmx.reset(reset);
            assert_eq!(vmx.msr(msr::SPEC_CTRL), Ok(0), "{reset:?}");
            assert_eq!((exits(&vmx)[0], is_read(&vmx)), (EXIT, false), "{reset:?}");
        }
    }

    #[test]
    fn a_cpu_without_it_never_loads_one() {
        let mut vmx = Vmx::new(Model::default(), Features::default()).unwrap();
        vmx.set_limits(OFFERED);
        vmx.set_msr(msr::SPEC_CTRL, IBRS).unwrap();
        assert_eq!((exits(&vmx)[0], is_read(&vmx)), (EXIT, false));
        assert_eq!(vmx.msr(msr::SPEC_CTRL), Ok(0));
    }
}
