//! What the manual says of a VM entry: SDM vol. 3C §27.2 and §27.3, rule by rule, in its order and by its numbers of bits. All rules
//! that an entry breaks are named. Nothing here is taken from the code under test but where a VMCS12 has its fields.

use std::collections::BTreeSet;

use gannet_nested_vmx::checks::Limits;
use gannet_nested_vmx::{Capabilities, GuestMemory, Vmcs12};
use x86::Gpa;
use x86::vmcs::capability::Allowed;
use x86::vmcs::field::{self, Field, Width};

use super::guest;

/// VM-instruction errors (SDM vol. 3C table 31-1).
const CONTROLS: u32 = 7;
const HOST: u32 = 8;

/// How an entry ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// VMfailValid with this error.
    Error(u32),
    /// An exit with this reason, bit 31 among it, and this qualification.
    Failed(u32, u64),
    /// The guest runs.
    Runs,
}

/// What an entry broken by a guest-state rule ends with (§27.8).
pub const fn failed(qualification: u64) -> End {
    End::Failed(33 | 1 << 31, qualification)
}

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Broken {
    /// The register or field, where a rule is one of several.
    pub of: &'static str,
    /// The rule, by its section.
    pub rule: &'static str,
    pub end: End,
}

/// The processor that enters.
#[derive(Clone, Copy)]
pub struct Processor<'a> {
    pub capabilities: &'a Capabilities,
    pub limits: &'a Limits,
    pub memory: &'a dyn Reads,
    /// The current VMCS pointer.
    pub current: u64,
    /// Bits of DR7 that have to be 0: the one word of the oracle's that a test makes wrong, to see that it is found.
    pub dr7_zeros: u64,
}

/// Physical memory. Where there is none a read gives ones.
pub trait Reads {
    fn bytes(&self, at: u64, into: &mut [u8]);
    fn is_there(&self, at: u64) -> bool;
}

impl<M: GuestMemory> Reads for M {
    fn bytes(&self, at: u64, into: &mut [u8]) {
        if self.read(Gpa(at), into).is_err() {
            into.fill(0xff);
        }
    }

    fn is_there(&self, at: u64) -> bool {
        self.read_u8(Gpa(at)).is_ok()
    }
}

/// An entry that is judged.
pub struct Entry<'a> {
    pub vmcs: &'a Vmcs12,
    pub processor: Processor<'a>,
    broken: Vec<Broken>,
}

/// All rules that the entry breaks.
pub fn judge(vmcs: &Vmcs12, processor: Processor<'_>) -> Vec<Broken> {
    let mut entry = Entry { vmcs, processor, broken: Vec::new() };
    entry.execution_controls();
    entry.translation_controls();
    entry.exit_controls();
    entry.entry_controls();
    entry.injection();
    entry.host_registers();
    entry.host_segments();
    entry.address_space();
    guest::judge(&mut entry);
    entry.broken
}

/// How an entry that breaks these rules may end. Controls go before the host state, as in this project and in stock KVM; the manual
/// leaves the order open (§27.2), as it does which qualification is told where several rules of the guest's state are broken (§27.8).
pub fn ends(broken: &[Broken]) -> BTreeSet<End> {
    let all: BTreeSet<End> = broken.iter().map(|b| b.end).collect();
    match all.first() {
        None => BTreeSet::from([End::Runs]),
        Some(first @ End::Error(_)) => BTreeSet::from([*first]),
        Some(_) => all,
    }
}

fn bit(word: u64, number: u32) -> bool {
    word >> number & 1 != 0
}

impl Entry<'_> {
    pub fn get<W: Width, A>(&self, field: Field<W, A>) -> u64 {
        self.vmcs.get(field).into()
    }

    pub fn pin(&self, number: u32) -> bool {
        bit(self.get(field::PIN_CONTROLS), number)
    }

    pub fn primary(&self, number: u32) -> bool {
        bit(self.get(field::PROC_CONTROLS), number)
    }

    /// Zeros unless they are activated (§25.6.2).
    pub fn secondary(&self, number: u32) -> bool {
        self.primary(31) && bit(self.get(field::PROC_CONTROLS2), number)
    }

    pub fn exit(&self, number: u32) -> bool {
        bit(self.get(field::EXIT_CONTROLS), number)
    }

    pub fn entry(&self, number: u32) -> bool {
        bit(self.get(field::ENTRY_CONTROLS), number)
    }

    /// The guest will be in IA-32e mode.
    pub fn ia32e(&self) -> bool {
        self.entry(9)
    }

    pub fn unrestricted(&self) -> bool {
        self.secondary(7)
    }

    /// Type and vector of the event that is injected, if one is.
    pub fn injected(&self) -> Option<(u64, u64)> {
        let info = self.get(field::ENTRY_INTERRUPTION);
        bit(info, 31).then_some((info >> 8 & 7, info & 0xff))
    }

    pub fn must(&mut self, holds: bool, end: End, of: &'static str, rule: &'static str) {
        if !holds {
            self.broken.push(Broken { of, rule, end });
        }
    }

    fn controls(&mut self, holds: bool, of: &'static str, rule: &'static str) {
        self.must(holds, End::Error(CONTROLS), of, rule);
    }

    fn host(&mut self, holds: bool, of: &'static str, rule: &'static str) {
        self.must(holds, End::Error(HOST), of, rule);
    }

    pub fn guest(&mut self, holds: bool, of: &'static str, rule: &'static str) {
        self.must(holds, failed(0), of, rule);
    }

    /// Whether an address sets no bit beyond the processor's width.
    pub fn is_physical(&self, address: u64) -> bool {
        address >> self.processor.limits.physical_bits == 0
    }

    fn is_page(&self, address: u64) -> bool {
        address & 0xfff == 0 && self.is_physical(address)
    }

    pub fn is_canonical(&self, address: u64) -> bool {
        let above = 64 - self.processor.limits.linear_bits;
        ((address << above) as i64 >> above) as u64 == address
    }

    fn has_reserved_bits_right(value: u64, allowed: Allowed) -> bool {
        let value = value as u32;
        value & allowed.must() == allowed.must() && value & !allowed.may() == 0
    }

    /// §27.2.1.1, but for what §28 and §29 call translation.
    fn execution_controls(&mut self) {
        let c = self.processor.capabilities;
        let pin = Self::has_reserved_bits_right(self.get(field::PIN_CONTROLS), c.pin);
        self.controls(pin, "", "27.2.1.1 pin: reserved bits");
        let primary = Self::has_reserved_bits_right(self.get(field::PROC_CONTROLS), c.primary);
        self.controls(primary, "", "27.2.1.1 primary: reserved bits");
        let word = self.get(field::PROC_CONTROLS2);
        let secondary = Self::has_reserved_bits_right(word, c.secondary);
        self.controls(secondary || !self.primary(31), "", "27.2.1.1 secondary: reserved bits");
        let most = c.misc >> 16 & 0x1ff;
        let count = self.get(field::CR3_TARGET_COUNT);
        self.controls(count <= most, "", "27.2.1.1 CR3-target count");
        for (of, address) in
            [("A", self.get(field::IO_BITMAP_A)), ("B", self.get(field::IO_BITMAP_B))]
        {
            let good = !self.primary(25) || self.is_page(address);
            self.controls(good, of, "27.2.1.1 I/O-bitmap address");
        }
        let good = !self.primary(28) || self.is_page(self.get(field::MSR_BITMAP));
        self.controls(good, "", "27.2.1.1 MSR-bitmap address");
        self.task_priority();
        self.controls(self.pin(3) || !self.pin(5), "", "27.2.1.1 virtual NMIs");
        self.controls(self.pin(5) || !self.primary(22), "", "27.2.1.1 NMI-window exiting");
        let good = !self.secondary(0) || self.is_page(self.get(field::APIC_ACCESS_ADDR));
        self.controls(good, "", "27.2.1.1 APIC-access address");
        for (of, number) in [("x2APIC mode", 4), ("APIC registers", 8), ("interrupts", 9)] {
            let good = self.primary(21) || !self.secondary(number);
            self.controls(good, of, "27.2.1.1 needs the TPR shadow");
        }
        let good = !(self.secondary(4) && self.secondary(0));
        self.controls(good, "", "27.2.1.1 x2APIC mode or APIC accesses");
        let good = !self.secondary(9) || self.pin(0);
        self.controls(good, "", "27.2.1.1 virtual interrupts need external-interrupt exiting");
        if self.pin(7) {
            self.controls(self.secondary(9), "delivery", "27.2.1.1 posted interrupts");
            self.controls(self.exit(15), "acknowledge", "27.2.1.1 posted interrupts");
            let vector = self.get(field::POSTED_INTR_VECTOR);
            self.controls(vector <= 255, "vector", "27.2.1.1 posted interrupts");
            let at = self.get(field::POSTED_INTR_DESC);
            self.controls(at & 0x3f == 0, "alignment", "27.2.1.1 posted interrupts");
            self.controls(self.is_physical(at), "width", "27.2.1.1 posted interrupts");
        }
    }

    fn task_priority(&mut self) {
        if !self.primary(21) {
            return;
        }
        let page = self.get(field::VIRTUAL_APIC_ADDR);
        self.controls(self.is_page(page), "", "27.2.1.1 virtual-APIC address");
        // No processor tells that there is no memory. This one does, where L2 can reach the page (docs/limits.md), as stock KVM.
        let exits = self.primary(19) && self.primary(20);
        let reached = !exits || self.secondary(4) || self.secondary(0);
        let good = !reached || self.processor.memory.is_there(page);
        self.controls(good, "", "no memory at the virtual-APIC address");
        let threshold = self.get(field::TPR_THRESHOLD);
        if self.secondary(9) {
            return;
        }
        self.controls(threshold >> 4 == 0, "", "27.2.1.1 TPR threshold: reserved bits");
        if !self.secondary(0) && self.is_page(page) {
            let mut byte = [0];
            self.processor.memory.bytes(page + 0x80, &mut byte);
            let good = threshold & 15 <= u64::from(byte[0] >> 4);
            self.controls(good, "", "27.2.1.1 TPR threshold above VTPR");
        }
    }

    /// The rest of §27.2.1.1.
    fn translation_controls(&mut self) {
        let c = self.processor.capabilities;
        let good = !self.secondary(5) || self.get(field::VPID) != 0;
        self.controls(good, "", "27.2.1.1 VPID");
        if self.secondary(1) {
            let pointer = self.get(field::EPT_POINTER);
            let can = c.ept_vpid.0;
            let kind = match pointer & 7 {
                0 => bit(can, 8),
                6 => bit(can, 14),
                _ => false,
            };
            self.controls(kind, "memory type", "27.2.1.1 EPT pointer");
            let levels = match pointer >> 3 & 7 {
                3 => bit(can, 6),
                4 => bit(can, 7),
                _ => false,
            };
            self.controls(levels, "levels", "27.2.1.1 EPT pointer");
            let good = !bit(pointer, 6) || bit(can, 21);
            self.controls(good, "accessed and dirty", "27.2.1.1 EPT pointer");
            // Bit 7, of supervisor shadow stacks, where bit 23 of the capabilities offers it.
            let good = pointer >> 8 & 15 == 0 && (!bit(pointer, 7) || bit(can, 23));
            self.controls(good, "reserved bits", "27.2.1.1 EPT pointer");
            self.controls(self.is_physical(pointer), "width", "27.2.1.1 EPT pointer");
        }
        if self.secondary(17) {
            self.controls(self.secondary(1), "", "27.2.1.1 PML needs EPT");
            let good = self.is_page(self.get(field::PML_ADDRESS));
            self.controls(good, "", "27.2.1.1 PML address");
        }
        let good = !self.secondary(7) || self.secondary(1);
        self.controls(good, "", "27.2.1.1 unrestricted guest needs EPT");
        if self.secondary(13) {
            let functions = self.get(field::VM_FUNCTION_CONTROLS);
            self.controls(functions & !c.vmfunc == 0, "", "27.2.1.1 VM functions: reserved bits");
            if bit(functions, 0) {
                self.controls(self.secondary(1), "", "27.2.1.1 EPTP switching needs EPT");
                let good = self.is_page(self.get(field::EPTP_LIST));
                self.controls(good, "", "27.2.1.1 EPTP-list address");
            }
        }
        if self.secondary(14) {
            let good = self.is_page(self.get(field::VMREAD_BITMAP));
            self.controls(good, "VMREAD", "27.2.1.1 bitmap address");
            let good = self.is_page(self.get(field::VMWRITE_BITMAP));
            self.controls(good, "VMWRITE", "27.2.1.1 bitmap address");
        }
        let good = !self.secondary(25) || self.get(field::TSC_MULTIPLIER) != 0;
        self.controls(good, "", "27.2.1.1 TSC multiplier");
    }

    /// A list of MSRs (§27.2.1.2, §27.2.1.3).
    fn list(&mut self, of: &'static str, address: u64, count: u64) {
        if count == 0 {
            return;
        }
        self.controls(address & 15 == 0, of, "27.2.1.2 MSR list: alignment");
        self.controls(self.is_physical(address), of, "27.2.1.2 MSR list: width");
        // "The arithmetic used for the computation uses more bits than the processor's physical-address width."
        let last = u128::from(address) + u128::from(count) * 16 - 1;
        let good = last >> self.processor.limits.physical_bits == 0;
        self.controls(good, of, "27.2.1.2 MSR list: last byte");
    }

    /// §27.2.1.2.
    fn exit_controls(&mut self) {
        let allowed = self.processor.capabilities.exit;
        let good = Self::has_reserved_bits_right(self.get(field::EXIT_CONTROLS), allowed);
        self.controls(good, "", "27.2.1.2 exit: reserved bits");
        let good = self.pin(6) || !self.exit(22);
        self.controls(good, "", "27.2.1.2 saving the preemption timer needs it");
        let (at, count) =
            (self.get(field::EXIT_MSR_STORE_ADDR), self.get(field::EXIT_MSR_STORE_COUNT));
        self.list("stored by exits", at, count);
        let (at, count) =
            (self.get(field::EXIT_MSR_LOAD_ADDR), self.get(field::EXIT_MSR_LOAD_COUNT));
        self.list("loaded by exits", at, count);
    }

    /// §27.2.1.3, but for the event that is injected.
    fn entry_controls(&mut self) {
        let allowed = self.processor.capabilities.entry;
        let good = Self::has_reserved_bits_right(self.get(field::ENTRY_CONTROLS), allowed);
        self.controls(good, "", "27.2.1.3 entry: reserved bits");
        let (at, count) =
            (self.get(field::ENTRY_MSR_LOAD_ADDR), self.get(field::ENTRY_MSR_LOAD_COUNT));
        self.list("loaded by entries", at, count);
        let outside = self.processor.limits.smm || !(self.entry(10) || self.entry(11));
        self.controls(outside, "", "27.2.1.3 SMM outside of SMM");
        self.controls(!(self.entry(10) && self.entry(11)), "", "27.2.1.3 SMM both");
    }

    /// §27.2.1.3: "fields relevant to VM-entry event injection must be set properly".
    fn injection(&mut self) {
        let Some((kind, vector)) = self.injected() else { return };
        let info = self.get(field::ENTRY_INTERRUPTION);
        // 7 is reserved where there is no monitor trap.
        let trap = bit(u64::from(self.processor.capabilities.primary.may()), 27);
        self.controls(kind != 1 && (kind != 7 || trap), "", "27.2.1.3 event: type");
        let vectors = match kind {
            2 => vector == 2,
            3 => vector <= 31,
            7 => vector == 0,
            _ => true,
        };
        self.controls(vectors, "", "27.2.1.3 event: vector");
        // Without an unrestricted guest CR0.PE is 1, or the guest's state is wrong: this is asked before.
        let protected = !self.unrestricted() || bit(self.get(field::GUEST_CR0), 0);
        let has_code = kind == 3 && protected && matches!(vector, 8 | 10..=14 | 17);
        self.controls(bit(info, 11) == has_code, "", "27.2.1.3 event: delivers an error code");
        self.controls(info >> 12 & 0x7_ffff == 0, "", "27.2.1.3 event: reserved bits");
        if bit(info, 11) {
            let code = self.get(field::ENTRY_ERROR_CODE);
            self.controls(code >> 16 == 0, "", "27.2.1.3 event: error code");
        }
        if matches!(kind, 4..=6) {
            let length = self.get(field::ENTRY_INSTRUCTION_LENGTH);
            let least = u64::from(!bit(self.processor.capabilities.misc, 30));
            let good = (least..=15).contains(&length);
            self.controls(good, "", "27.2.1.3 event: instruction length");
        }
    }

    /// §27.2.2.
    fn host_registers(&mut self) {
        let (c, limits) = (self.processor.capabilities, self.processor.limits);
        // "The bits corresponding to CR0.NW (bit 29) and CR0.CD (bit 30) are never checked."
        let cr0 = self.get(field::HOST_CR0);
        let never = 1 << 29 | 1 << 30;
        let good = c.cr0_fixed0 & !cr0 & !never == 0 && cr0 & !c.cr0_fixed1 & !never == 0;
        self.host(good, "", "27.2.2 CR0");
        let cr4 = self.get(field::HOST_CR4);
        let good = c.cr4_fixed0 & !cr4 == 0 && cr4 & !c.cr4_fixed1 == 0;
        self.host(good, "", "27.2.2 CR4");
        self.host(self.is_physical(self.get(field::HOST_CR3)), "", "27.2.2 CR3");
        let good = self.is_canonical(self.get(field::HOST_SYSENTER_ESP));
        self.host(good, "ESP", "27.2.2 SYSENTER");
        let good = self.is_canonical(self.get(field::HOST_SYSENTER_EIP));
        self.host(good, "EIP", "27.2.2 SYSENTER");
        let counters = self.get(field::HOST_PERF_GLOBAL_CTRL);
        let good = !self.exit(12) || counters & !limits.perf_global_ctrl == 0;
        self.host(good, "", "27.2.2 PERF_GLOBAL_CTRL");
        let good = !self.exit(19) || is_pat(self.get(field::HOST_PAT));
        self.host(good, "", "27.2.2 PAT");
        if self.exit(21) {
            let efer = self.get(field::HOST_EFER);
            self.host(efer & !limits.efer == 0, "", "27.2.2 EFER: reserved bits");
            self.host(bit(efer, 10) == self.exit(9), "LMA", "27.2.2 EFER and the address space");
            self.host(bit(efer, 8) == self.exit(9), "LME", "27.2.2 EFER and the address space");
        }
    }

    /// §27.2.3.
    fn host_segments(&mut self) {
        for (of, selector) in [
            ("ES", self.get(field::HOST_ES_SELECTOR)),
            ("CS", self.get(field::HOST_CS_SELECTOR)),
            ("SS", self.get(field::HOST_SS_SELECTOR)),
            ("DS", self.get(field::HOST_DS_SELECTOR)),
            ("FS", self.get(field::HOST_FS_SELECTOR)),
            ("GS", self.get(field::HOST_GS_SELECTOR)),
            ("TR", self.get(field::HOST_TR_SELECTOR)),
        ] {
            self.host(selector & 7 == 0, of, "27.2.3 selector: RPL and TI");
            let null = match of {
                "CS" | "TR" => false,
                "SS" => self.exit(9),
                _ => true,
            };
            self.host(null || selector != 0, of, "27.2.3 selector: null");
        }
        for (of, base) in [
            ("FS", self.get(field::HOST_FS_BASE)),
            ("GS", self.get(field::HOST_GS_BASE)),
            ("GDTR", self.get(field::HOST_GDTR_BASE)),
            ("IDTR", self.get(field::HOST_IDTR_BASE)),
            ("TR", self.get(field::HOST_TR_BASE)),
        ] {
            self.host(self.is_canonical(base), of, "27.2.3 base");
        }
    }

    /// §27.2.4.
    fn address_space(&mut self) {
        let (rip, cr4) = (self.get(field::HOST_RIP), self.get(field::HOST_CR4));
        if self.processor.limits.long_mode {
            self.host(self.exit(9), "", "27.2.4 a host in IA-32e mode");
        } else {
            let good = !self.ia32e() && !self.exit(9);
            self.host(good, "", "27.2.4 a host outside of IA-32e mode");
        }
        if self.exit(9) {
            self.host(bit(cr4, 5), "CR4.PAE", "27.2.4 64-bit host");
            self.host(self.is_canonical(rip), "RIP", "27.2.4 64-bit host");
        } else {
            self.host(!self.ia32e(), "guest", "27.2.4 32-bit host");
            self.host(!bit(cr4, 17), "CR4.PCIDE", "27.2.4 32-bit host");
            self.host(rip >> 32 == 0, "RIP", "27.2.4 32-bit host");
        }
    }
}

/// Whether WRMSR of the PAT would take the value: UC, WC, WT, WP, WB, UC-.
pub fn is_pat(pat: u64) -> bool {
    pat.to_le_bytes().iter().all(|kind| [0, 1, 4, 5, 6, 7].contains(kind))
}
