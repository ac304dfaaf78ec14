//! Table registers of L1 after an exit of L2: written where they can be others than the exit loads, and watched
//! meanwhile ([`crate::host_words::TableWatch`]).

use cpu::Cpu;
use x86::{Cr4, vmcs::ProcControls2};

use crate::{host_words::HostWords, state::Vmx};

impl<C: Cpu> Vmx<C> {
    /// Whether L1 itself is to have its table instructions exit, by UMIP.
    fn l1_has_umip_exits(&self) -> bool {
        // By `self.cr4`: L1 is what runs when this is asked.
        self.features.umip_by_exits && self.cr4.contains(Cr4::UMIP)
    }

    /// The table registers as an exit of L2 loads them. vmcs01 is loaded, and L1 is what runs.
    #[inline]
    pub(crate) fn load_host_tables(&mut self, words: &HostWords, changed: bool) {
        // Without that watch the SYSENTER MSRs may be others than were loaded.
        // Three ways to be other than the exit loads: L1 has a new host state, has used such an instruction, or may have.
        if changed || !self.cold.tables.is_known() || !self.watches_sysenter() {
            self.write_host_tables(words);
        }
    }

    #[cold]
    #[inline(never)]
    fn write_host_tables(&mut self, words: &HostWords) {
        words.write_tables(&self.cpu, &self.vmcs);
        // The watch begins behind the write: what is known now is what was written.
        if self.features.table_exits && self.cold.tables.loaded() {
            self.change_proc2(ProcControls2::DESCRIPTOR_TABLES, true);
        }
    }

    /// L1 has used an instruction for table registers. True: it exited for the watch alone, which is over, and is
    /// to be executed again.
    #[cold]
    #[inline(never)]
    pub(crate) fn stop_watching_tables(&mut self) -> bool {
        // In L2 the exits are L1's, and with UMIP they mean something for the guest.
        // Also where the watch is given up in vain: L1 uses such instructions, and is not to be watched for a while.
        if self.cold.of_l1.runs || !self.cold.tables.give_up() || self.l1_has_umip_exits() {
            return false;
        }
        self.change_proc2(ProcControls2::DESCRIPTOR_TABLES, false);
        true
    }

    /// Secondary controls of vmcs01 that say nothing of L2: they are there for the watch of L1, or for its UMIP.
    #[inline]
    pub(crate) fn watching_controls(&self) -> ProcControls2 {
        // Off in what L2's controls are made from: L1 would see exits for which nobody asked.
        if self.cold.tables.watches() || self.features.umip_by_exits {
            ProcControls2::DESCRIPTOR_TABLES
        } else {
            ProcControls2::empty()
        }
    }
}
