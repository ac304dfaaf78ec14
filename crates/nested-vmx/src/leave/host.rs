//! The state in which L1 goes on after an exit of L2: the VMCS12's host-state area
//! (SDM vol. 3C §28.5, §28.6).

use x86::segment::{attr, kind};
use x86::vmcs::field;
use x86::vmcs::{ExitControls, ExitReason};
use x86::{Cr0, Cr4, DescriptorTable, Efer, Segment};

use crate::checks::lists::List;
use crate::{Capabilities, Vmcs12};

/// L1's registers that an exit loads, beside segments and the SYSENTER MSRs. General registers stay as L2 left them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named as the registers.
pub struct Registers {
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    pub rip: u64,
    pub rsp: u64,
    pub rflags: u64,
    pub dr7: u64,
    pub debugctl: u64,
    /// `None`: L1's own of before the entry.
    pub pat: Option<u64>,
    /// `None`: the MSR stays.
    pub perf_global_ctrl: Option<u64>,
    /// The PDPTEs have to be loaded from CR3's table; if they are bad, the exit is a VMX abort.
    pub loads_pdptes: bool,
    /// NMIs are blocked: the exit was for one.
    pub blocks_nmis: bool,
}

/// L1's segment and table registers that an exit loads: they follow from the VMCS12 alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named as the registers.
pub struct Segments {
    pub es: Segment,
    pub cs: Segment,
    pub ss: Segment,
    pub ds: Segment,
    pub fs: Segment,
    pub gs: Segment,
    pub tr: Segment,
    pub ldtr: Segment,
    pub gdtr: DescriptorTable,
    pub idtr: DescriptorTable,
}

/// Why L1 cannot go on (SDM vol. 3C §28.7). The indicator is written into the VMCS12's region; the vCPU shuts
/// down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The manual's list, shortened.
pub enum Abort {
    SavingMsrs = 1,
    HostPdptes = 2,
    CorruptedVmcs = 3,
    LoadingMsrs = 4,
    MachineCheck = 5,
    HostNot64 = 6,
}

/// L1's state before the exit, where the exit keeps a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// CR0 of L2, of which some bits stay.
    pub cr0: u64,
    /// EFER of L2, of which some bits stay if the exit does not load it.
    pub efer: u64,
}

/// CR0 bits that an exit leaves as they are.
// Caching is not switched off and on by an exit (§28.5.1): L1 has what L2 had.
const CR0_KEPT: u64 = Cr0::ET.bits() | Cr0::NW.bits() | Cr0::CD.bits();
/// CR0 bits that an exit loads. All others are no processor's, and an exit leaves them alone too (§28.5.1), though a field that has
/// them set passes the checks: IA32_VMX_CR0_FIXED1 lets every bit of the lower half be 1.
const CR0_LOADED: u64 = Cr0::PE
    .union(Cr0::MP)
    .union(Cr0::EM)
    .union(Cr0::TS)
    .union(Cr0::NE)
    .union(Cr0::WP)
    .union(Cr0::AM)
    .union(Cr0::PG)
    .bits();
const FLAT: u32 = u32::MAX;

/// DS and its like after an exit.
fn data(selector: u16, base: u64) -> Segment {
    // The attributes are those that the manual lists (§28.5.2), whatever the descriptor tables of L1 say.
    let usable = attr::P | attr::S | kind::DATA_RW_ACCESSED as u16 | attr::DB | attr::G;
    // A null selector makes the register unusable. Its base is loaded all the same, as FS and GS show in 64-bit mode.
    Segment { base, limit: FLAT, selector, attr: if selector == 0 { 0 } else { usable } }
}

/// L1's registers after an exit.
pub fn registers(v: &Vmcs12, kept: Kept, reason: ExitReason, is_nmi: bool) -> Registers {
    let exit = v.exit();
    let long = exit.contains(ExitControls::HOST_64);
    let mode = (Efer::LMA | Efer::LME).bits();
    // An exit that loads no EFER sets LMA and LME all the same, by the host's mode (SDM vol. 3C
    // §28.5.1).
    let efer = if exit.contains(ExitControls::LOAD_EFER) {
        v.get(field::HOST_EFER)
    } else if long {
        kept.efer | mode
    } else {
        kept.efer & !mode
    };
    // An exit sets and clears these by itself (§28.5.1), although an entry has asked for the same.
    let mut cr4 = v.get(field::HOST_CR4);
    if long {
        cr4 |= Cr4::PAE.bits();
    } else {
        cr4 &= !Cr4::PCIDE.bits();
    }
    // A control that is off: the CPU would go on with L2's value, and here L1 has its own of before, as on stock KVM.
    let loads = |control, value| exit.contains(control).then_some(value);
    Registers {
        // Stock KVM loads the field whole, CD and NW too.
        cr0: v.get(field::HOST_CR0) & CR0_LOADED | kept.cr0 & CR0_KEPT,
        cr3: v.get(field::HOST_CR3),
        cr4,
        efer,
        rip: v.get(field::HOST_RIP),
        rsp: v.get(field::HOST_RSP),
        // All flags but the fixed one are clear: L1 goes on with interrupts off.
        rflags: x86::Rflags::FIXED.bits(),
        // No breakpoint of L2's is to hit in L1.
        dr7: x86::Dr7::RESET.bits(),
        debugctl: 0,
        pat: loads(ExitControls::LOAD_PAT, v.get(field::HOST_PAT)),
        perf_global_ctrl: loads(
            ExitControls::LOAD_PERF_GLOBAL_CTRL,
            v.get(field::HOST_PERF_GLOBAL_CTRL),
        ),
        // PAE paging of 32 bits: an exit loads the table's entries anew, as MOV to CR3 does.
        loads_pdptes: !long && cr4 & Cr4::PAE.bits() != 0,
        // Blocking by NMI begins with the exit, as it would with the delivery.
        blocks_nmis: reason == ExitReason::ExceptionOrNmi && is_nmi,
    }
}

/// L1's segment and table registers after an exit.
pub fn segments(v: &Vmcs12) -> Segments {
    let long = v.exit().contains(ExitControls::HOST_64);
    Segments {
        es: data(v.get(field::HOST_ES_SELECTOR), 0),
        cs: code(v.get(field::HOST_CS_SELECTOR), long),
        ss: data(v.get(field::HOST_SS_SELECTOR), 0),
        ds: data(v.get(field::HOST_DS_SELECTOR), 0),
        fs: data(v.get(field::HOST_FS_SELECTOR), v.get(field::HOST_FS_BASE)),
        gs: data(v.get(field::HOST_GS_SELECTOR), v.get(field::HOST_GS_BASE)),
        tr: task(v.get(field::HOST_TR_SELECTOR), v.get(field::HOST_TR_BASE)),
        ldtr: Segment::default(),
        // An exit sets both limits to the most that there is: the VMCS has no field for them.
        gdtr: DescriptorTable { base: v.get(field::HOST_GDTR_BASE), limit: 0xffff },
        idtr: DescriptorTable { base: v.get(field::HOST_IDTR_BASE), limit: 0xffff },
    }
}

// DPL 0, and the size by the mode alone.
fn code(selector: u16, long: bool) -> Segment {
    let size = if long { attr::L } else { attr::DB };
    let attr = attr::P | attr::S | kind::CODE_RX_ACCESSED as u16 | size | attr::G;
    Segment { base: 0, limit: FLAT, selector, attr }
}

fn task(selector: u16, base: u64) -> Segment {
    // A busy task state of 67h + 1 bytes. An exit checks nothing of what is there.
    Segment { base, limit: 0x67, selector, attr: attr::P | kind::TSS_BUSY as u16 }
}

/// MSRs of L2 that an exit stores.
pub fn stores(v: &Vmcs12, c: &Capabilities) -> List {
    List {
        at: v.get(field::EXIT_MSR_STORE_ADDR),
        count: v.get(field::EXIT_MSR_STORE_COUNT),
        limit: c.msr_list_limit(),
    }
}

/// MSRs of L1 that an exit loads.
pub fn loads(v: &Vmcs12, c: &Capabilities) -> List {
    List {
        at: v.get(field::EXIT_MSR_LOAD_ADDR),
        count: v.get(field::EXIT_MSR_LOAD_COUNT),
        limit: c.msr_list_limit(),
    }
}

/// MSRs of L2 that an entry loads.
pub fn entry_loads(v: &Vmcs12, c: &Capabilities) -> List {
    List {
        at: v.get(field::ENTRY_MSR_LOAD_ADDR),
        count: v.get(field::ENTRY_MSR_LOAD_COUNT),
        limit: c.msr_list_limit(),
    }
}
