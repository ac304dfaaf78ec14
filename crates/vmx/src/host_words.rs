//! L1's segments after an exit of L2, as vmcs01 takes them: made when L1 changes its VMCS's host state, and written at
//! each exit. What the data and code segments were before is not known: L1 loads them without an exit. The table
//! registers it loads by instructions that can exit ([`TableWatch`]).

use cpu::Cpu;
use nested_vmx::leave::host::Segments;
use x86::Segment;
use x86::segment::attr;

use crate::{
    fields::{self, Set},
    segments,
    vmcs::Vmcs,
};

/// One segment register's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Words {
    base: u64,
    limit: u32,
    rights: u32,
    selector: u16,
    /// Base and limit of a register that cannot be used are undefined after an exit, but for the bases of FS and GS
    /// (SDM vol. 3C §28.5.2).
    usable: bool,
}

impl Words {
    const NONE: Self = Self { selector: 0, base: 0, limit: 0, rights: 0, usable: false };

    fn of(segment: &Segment) -> Self {
        // Present, of a kind that an entry takes: what an exit loads is made so ([`Segments`]).
        Self {
            selector: segment.selector,
            base: segment.base,
            limit: segment.limit,
            rights: segments::rights(segment.attr),
            usable: segment.attr & attr::P != 0,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct HostWords {
    es: Words,
    cs: Words,
    ss: Words,
    ds: Words,
    fs: Words,
    gs: Words,
    tr: Words,
    ldtr: Words,
    gdtr: u64,
    idtr: u64,
    sysenter: Sysenter,
}

/// The SYSENTER MSRs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sysenter {
    pub(crate) cs: u32,
    pub(crate) esp: u64,
    pub(crate) eip: u64,
}

/// Writes a register's words, out of straight code.
macro_rules! write {
    ($cpu:expr, $words:expr, $selector:ident, $base:ident, $limit:ident, $rights:ident) => {
        // Past the cache, and unconditionally: to know what L1 has in a register would be a VMREAD, which costs as much.
        $cpu.vmwrite(fields::$selector.encoding(), $words.selector.into());
        if $words.usable {
            $cpu.vmwrite(fields::$base.encoding(), $words.base);
            $cpu.vmwrite(fields::$limit.encoding(), $words.limit.into());
        }
        $cpu.vmwrite(fields::$rights.encoding(), $words.rights.into());
    };
}

impl HostWords {
    pub(crate) const NONE: Self = Self {
        es: Words::NONE,
        cs: Words::NONE,
        ss: Words::NONE,
        ds: Words::NONE,
        fs: Words::NONE,
        gs: Words::NONE,
        tr: Words::NONE,
        ldtr: Words::NONE,
        gdtr: 0,
        idtr: 0,
        sysenter: Sysenter { cs: 0, esp: 0, eip: 0 },
    };

    /// Makes the words anew.
    #[cold]
    #[inline(never)]
    pub(crate) fn make(&mut self, s: &Segments, sysenter: Sysenter) {
        *self = Self {
            es: Words::of(&s.es),
            cs: Words::of(&s.cs),
            ss: Words::of(&s.ss),
            ds: Words::of(&s.ds),
            fs: Words::of(&s.fs),
            gs: Words::of(&s.gs),
            tr: Words::of(&s.tr),
            ldtr: Words::of(&s.ldtr),
            gdtr: s.gdtr.base,
            idtr: s.idtr.base,
            sysenter,
        };
    }

    /// Writes the segments into the VMCS, which is current.
    #[inline]
    pub(crate) fn write_segments(&self, cpu: &impl Cpu, vmcs: &Vmcs) {
        write!(cpu, self.es, GUEST_ES_SELECTOR, GUEST_ES_BASE, GUEST_ES_LIMIT, GUEST_ES_RIGHTS);
        write!(cpu, self.cs, GUEST_CS_SELECTOR, GUEST_CS_BASE, GUEST_CS_LIMIT, GUEST_CS_RIGHTS);
        // SS without the macro: its rights are in the cache, and known.
        cpu.vmwrite(fields::GUEST_SS_SELECTOR.encoding(), self.ss.selector.into());
        if self.ss.usable {
            cpu.vmwrite(fields::GUEST_SS_BASE.encoding(), self.ss.base);
            cpu.vmwrite(fields::GUEST_SS_LIMIT.encoding(), self.ss.limit.into());
        }
        write!(cpu, self.ds, GUEST_DS_SELECTOR, GUEST_DS_BASE, GUEST_DS_LIMIT, GUEST_DS_RIGHTS);
        write!(cpu, self.fs, GUEST_FS_SELECTOR, GUEST_FS_BASE, GUEST_FS_LIMIT, GUEST_FS_RIGHTS);
        // Unusable, they still have a base: 64-bit code addresses by it.
        if !self.fs.usable {
            cpu.vmwrite(fields::GUEST_FS_BASE.encoding(), self.fs.base);
        }
        write!(cpu, self.gs, GUEST_GS_SELECTOR, GUEST_GS_BASE, GUEST_GS_LIMIT, GUEST_GS_RIGHTS);
        if !self.gs.usable {
            cpu.vmwrite(fields::GUEST_GS_BASE.encoding(), self.gs.base);
        }
        // The level at which L1 executed its entry was asked for, so that the rights of SS may be known.
        if vmcs.fields.set(fields::GUEST_SS_RIGHTS, self.ss.rights) == Set::Changed {
            cpu.vmwrite(fields::GUEST_SS_RIGHTS.encoding(), self.ss.rights.into());
        }
        vmcs.fields.forget_segments();
    }

    /// Sets the SYSENTER MSRs.
    pub(crate) fn set_sysenter(&self, cpu: &impl Cpu, vmcs: &Vmcs) {
        // By the cache: they are nearly always what they were.
        vmcs.set(cpu, fields::GUEST_SYSENTER_CS, self.sysenter.cs);
        vmcs.set(cpu, fields::GUEST_SYSENTER_ESP, self.sysenter.esp);
        vmcs.set(cpu, fields::GUEST_SYSENTER_EIP, self.sysenter.eip);
    }

    /// Writes the table registers too, and the SYSENTER MSRs.
    #[cold]
    #[inline(never)]
    pub(crate) fn write_tables(&self, cpu: &impl Cpu, vmcs: &Vmcs) {
        self.set_sysenter(cpu, vmcs);
        write!(cpu, self.tr, GUEST_TR_SELECTOR, GUEST_TR_BASE, GUEST_TR_LIMIT, GUEST_TR_RIGHTS);
        write!(
            cpu,
            self.ldtr,
            GUEST_LDTR_SELECTOR, GUEST_LDTR_BASE, GUEST_LDTR_LIMIT, GUEST_LDTR_RIGHTS
        );
        cpu.vmwrite(fields::GUEST_GDTR_BASE.encoding(), self.gdtr);
        cpu.vmwrite(fields::GUEST_GDTR_LIMIT.encoding(), LIMIT);
        cpu.vmwrite(fields::GUEST_IDTR_BASE.encoding(), self.idtr);
        cpu.vmwrite(fields::GUEST_IDTR_LIMIT.encoding(), LIMIT);
    }
}

/// What an exit makes of the limits of GDTR and IDTR.
const LIMIT: u64 = 0xffff;

/// GDTR, IDTR, LDTR, TR and the SYSENTER MSRs of L1 from one exit of L2 to the next. L1's instructions that load one exit while they are
/// watched, WRMSR always, and so does a task switch: what nobody has set is what the last exit of L2 has loaded. An L1 that uses them
/// between its guest's runs is not watched for a time, so that it does not pay for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableWatch {
    /// vmcs01 has them exit.
    watches: bool,
    /// They are what the last exit of L2 has loaded.
    known: bool,
    /// Exits of L2 that are to come before they are watched again.
    patience: u8,
}

/// Exits of L2 without a watch, after L1 has used such an instruction.
const PATIENCE: u8 = 100;

impl TableWatch {
    /// Somebody has set the words.
    #[inline]
    pub(crate) fn touched(&mut self) {
        self.known = false;
    }

    /// Whether L1's instructions exit for the watch alone.
    #[inline]
    pub(crate) fn watches(self) -> bool {
        self.watches
    }

    /// At an exit of L2, if its host state is the same: whether they are as it has them.
    #[inline]
    pub(crate) fn is_known(self) -> bool {
        self.watches && self.known
    }

    /// An exit has loaded the words. True: the watch begins.
    pub(crate) fn loaded(&mut self) -> bool {
        // Known, whether or not anybody watches: the watch that begins here begins with this.
        self.known = true;
        if self.watches {
            return false;
        }
        match self.patience.checked_sub(1) {
            // Patience runs in exits of L2: an L1 that loads a table at each of them is asked seldom.
            Some(left) => self.patience = left,
            None => self.watches = true,
        }
        self.watches
    }

    /// L1 uses them. True: the watch ends.
    pub(crate) fn give_up(&mut self) -> bool {
        self.known = false;
        // Such an instruction is likely to come again: a watch that ends at each costs more than it spares.
        self.patience = PATIENCE;
        core::mem::take(&mut self.watches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_known_only_while_they_are_watched_and_untouched() {
        let mut watch = TableWatch::default();
        assert!(!watch.is_known());
        assert!(watch.loaded() && watch.is_known());
        assert!(!watch.loaded(), "it has begun already");
        watch.touched();
        assert!(!watch.is_known() && watch.watches());
        watch.loaded();
        assert!(watch.is_known());
        assert!(watch.give_up() && !watch.is_known());
        for _ in 0..PATIENCE {
            assert!(!watch.loaded() && !watch.is_known());
        }
        assert!(watch.loaded() && watch.is_known());
    }
}
