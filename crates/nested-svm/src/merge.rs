//! What block 02 has to hold so that L2 runs as L1 asked and L0 stays in control.
//!
//! Block 02 is memory, so a field costs a load and a store; what costs more is to tell the processor that a group
//! of fields has changed. So every group is compared, and [`enter`] returns the groups that really changed; the
//! save area's groups that L1 calls clean are not even looked at (see the crate's head for why that is safe).
//!
//! Three masks decide whose a control is. What only L1 means goes through (V_TPR, V_IRQ with vector and priority,
//! the interrupt shadow, EVENTINJ). What L0 must have stays (V_INTR_MASKING, nested paging, its intercepts). What
//! is neither's is zero: a bit that a later processor gives a meaning is not L1's to set.

use x86::{
    Cr0, Dr6, Hpa, Rflags,
    msr::debugctl,
    vmcb::{
        Clean, Control, Intercept3, Intercept4, NP_ENABLE, Save, VIRTUAL_LBR, VIRTUAL_VMLOAD, Vmcb,
        event, vintr,
    },
};

use zerocopy::transmute;

use crate::Offered;

/// Bits of `int_ctl` that are L1's to set for L2.
const INT_CTL_L1: u32 = vintr::TPR_MASK | vintr::IRQ | (0xf << vintr::PRIO_SHIFT) | vintr::IGN_TPR;

/// V_GIF, and that it is L2's own flag: STGI and CLGI of L2 change it without an exit.
const VIRTUAL_GIF: u32 = vintr::GIF | vintr::GIF_ENABLE;

/// Virtual NMIs: one that waits, their mask, and that they are L2's own.
const VIRTUAL_NMI: u32 = vintr::NMI | vintr::NMI_MASK | vintr::NMI_ENABLE;

/// The intercept of writes of CR8, in vector 0.
const WRITE_CR8: u32 = 1 << (16 + 8);

/// What L0 wants of the block that L2 runs on.
#[derive(Clone, Copy, Debug)]
pub struct L0 {
    /// The intercepts that L0 needs whoever runs.
    pub intercepts: [u32; 6],
    /// What of L1's offset to the host's TSC L2 has.
    pub tsc_offset: u64,
    /// L0's I/O map: every port exits.
    pub iopm: Hpa,
    /// The merged MSR map.
    pub msrpm: Hpa,
    /// What walks L2's guest-physical addresses: the shadow of NPT12, or L1's own tables. `None`: L0 runs without
    /// nested paging, and the paging registers of block 02 are not written here.
    pub root: Option<Hpa>,
    /// L1's PAT, which L2 has as well without nested paging of L1's.
    pub pat: u64,
    /// PAUSE filter of L0: threshold and count.
    pub pause: (u16, u16),
    /// RFLAGS.IF of L1 at VMRUN.
    pub l1_interrupts: bool,
}

/// Intercepts of L2: L0's and L1's.
///
/// L0 asks to hear of a write of CR8 and of the interrupt window for L1's sake. With V_INTR_MASKING neither says
/// anything of L1: CR8 of L2 is a priority of its own, and whether L1 can take an interrupt depends on its IF at
/// VMRUN alone. VMMCALL is L1's: without its intercept it is #UD, which the processor raises. VMLOAD and VMSAVE of
/// L2 mean addresses of L1's, so L0 always hears of them, unless the CPU takes them through L1's tables for L2
/// ([`moves_by_cpu`]). With a GIF of L2's own its STGI and CLGI are nothing to L0.
pub fn intercepts(l0: &L0, control: &Control, offered: &Offered) -> [u32; 6] {
    let [mut cr, dr, exceptions, mut third, mut fourth, fifth] = l0.intercepts;
    // Without V_INTR_MASKING L2's IF and CR8 are L1's machine's: L0 goes on hearing of both.
    if control.int_ctl & vintr::INTR_MASKING != 0 {
        cr &= !WRITE_CR8;
        // L1 that masked interrupts takes none, whatever window L2 opens.
        if !l0.l1_interrupts {
            third &= !Intercept3::VINTR.bits();
        }
    }
    // What L0 asks for of VMMCALL is for L1's hypercalls: L2's are to L1, or nobody's.
    fourth &= !Intercept4::VMMCALL.bits();
    let moves = Intercept4::VMLOAD | Intercept4::VMSAVE;
    // L2's VMRUN exits whatever L1 asks: `checks` has refused a block without, and this does not rely on it.
    fourth = fourth & !moves.bits() | Intercept4::VMRUN.bits();
    if !moves_by_cpu(control, offered) {
        fourth |= moves.bits();
    }
    if has_virtual_gif(control, offered) {
        // They are L2's own then, and L0 has no GIF of L2's to keep.
        fourth &= !(Intercept4::STGI | Intercept4::CLGI).bits();
    }
    let mine = [cr, dr, exceptions, third, fourth, fifth];
    let mut both = control.intercepts;
    // L1's intercepts are all taken over: one that is unknown to us makes an exit that L1 asked for.
    for (word, mine) in both.iter_mut().zip(mine) {
        *word |= mine;
    }
    both
}

/// The instructions that have to exit from a block with these controls: without the feature that makes them the guest's own
/// they reach the host's memory, or its GIF.
pub fn must_exit(block: &Control) -> Intercept4 {
    let mut exits = Intercept4::empty();
    let (moves, gif) =
        (Intercept4::VMLOAD | Intercept4::VMSAVE, Intercept4::STGI | Intercept4::CLGI);
    exits.set(moves, block.virt_ext & VIRTUAL_VMLOAD == 0);
    exits.set(gif, block.int_ctl & vintr::GIF_ENABLE == 0);
    exits
}

/// Whether L2 has a GIF of its own.
fn has_virtual_gif(control: &Control, offered: &Offered) -> bool {
    // Both: an L1 that was not offered the feature has a bit set that means nothing.
    offered.vgif && control.int_ctl & vintr::GIF_ENABLE != 0
}

/// Whether the CPU carries out VMLOAD and VMSAVE of L2.
pub fn moves_by_cpu(control: &Control, offered: &Offered) -> bool {
    // It would move half of SYSENTER's addresses. As outside of 64-bit mode L1 hears of them then, and not L0, which has no
    // translation for them (APM vol. 2 §15.33.1).
    has_virtual_vmload(control, offered) && !offered.wide_sysenter
}

/// Whether VMLOAD and VMSAVE of L2 name addresses that go through tables of L1's.
pub fn has_virtual_vmload(control: &Control, offered: &Offered) -> bool {
    offered.virtual_vmload
        // Without nested paging of L1's the addresses would go through no table that holds for L2.
        && control.np_ctl & NP_ENABLE != 0
        && control.virt_ext & VIRTUAL_VMLOAD != 0
}

/// Whether L2 has virtual NMIs of its own: a block that says so was refused where they are not offered.
#[inline]
pub const fn has_virtual_nmi(control: &Control) -> bool {
    control.int_ctl & vintr::NMI_ENABLE != 0
}

/// Whether L2 has a DEBUGCTL and branch records of its own.
#[inline]
pub fn has_branch_records(control: &Control, offered: &Offered) -> bool {
    offered.lbr && control.virt_ext & VIRTUAL_LBR != 0
}

/// Copies DEBUGCTL, as far as a guest may set it, and the branch records; true if that changed one of them.
pub fn copy_branch_records(to: &mut Save, from: &Save) -> bool {
    // BTF would step our own single steps over instructions.
    // All of them by `|` and not by `||`: each has to be copied.
    put(&mut to.dbgctl, from.dbgctl & debugctl::LBR)
        | put(&mut to.br_from, from.br_from)
        | put(&mut to.br_to, from.br_to)
        | put(&mut to.last_excp_from, from.last_excp_from)
        | put(&mut to.last_excp_to, from.last_excp_to)
}

/// Writes into block 02 what L2 is to run with. `v12`: the copy of VMCB12, checked. `dirty`: which groups of its
/// save area may be other than in block 02. Returns the groups of block 02 that have changed.
pub fn enter(to: &mut Vmcb, v12: &Vmcb, dirty: Clean, l0: &L0, offered: &Offered) -> Clean {
    // Where a software interrupt that is injected goes on: a CPU without the field pushes RIP, this one what is there, be it of
    // an exit before.
    if offered.nrip_save {
        to.control.next_rip = v12.control.next_rip;
    } else if v12.control.event_inj & event::VALID != 0 {
        to.control.next_rip = v12.save.rip;
    }
    controls(&mut to.control, &v12.control, l0, offered)
        | paging(to, v12, l0)
        | registers(&mut to.save, &v12.save, dirty & own_paging(l0))
        | branch_records(to, v12, offered)
}

/// Without nested paging of L0's, CR0, CR3, CR4 and EFER in block 02 are those of the shadow tables.
fn own_paging(l0: &L0) -> Clean {
    if l0.root.is_some() { Clean::ALL } else { Clean::ALL - Clean::CR }
}

/// Sets a place; true if that changed it.
fn put<T: PartialEq>(place: &mut T, value: T) -> bool {
    let changed = *place != value;
    if changed {
        *place = value;
    }
    changed
}

fn controls(to: &mut Control, from: &Control, l0: &L0, offered: &Offered) -> Clean {
    let mut stale = Clean::empty();
    let (threshold, count) = pause(from, l0, offered);
    let intercepting = put_intercepts(&mut to.intercepts, intercepts(l0, from, offered))
        // Offsets are sums modulo 2^64, as a CPU adds them.
        | put(&mut to.tsc_offset, l0.tsc_offset.wrapping_add(from.tsc_offset))
        | put(&mut to.pause_filter_thresh, threshold)
        | put(&mut to.pause_filter_count, count);
    stale.set(Clean::INTERCEPTS, intercepting);
    // L0's maps in both cases: L1's own addresses are never the hardware's.
    let maps = put(&mut to.iopm_base_pa, l0.iopm.0) | put(&mut to.msrpm_base_pa, l0.msrpm.0);
    stale.set(Clean::PERM_MAP, maps);
    let mut of_l1 = INT_CTL_L1;
    if offered.vgif | offered.vnmi {
        of_l1 |= if has_virtual_gif(from, offered) { VIRTUAL_GIF } else { 0 };
        of_l1 |= if offered.vnmi && has_virtual_nmi(from) { VIRTUAL_NMI } else { 0 };
    }
    // L0's, whatever L1 asks: physical interrupts are the host's.
    // L1's other bits, AVIC among them, do not reach the block: they would name pages of the host.
    let int_ctl = vintr::INTR_MASKING | (from.int_ctl & of_l1);
    let virtual_interrupt =
        put(&mut to.int_ctl, int_ctl) | put(&mut to.int_vector, from.int_vector);
    stale.set(Clean::INTR, virtual_interrupt);
    // No group: the processor reads these at every VMRUN.
    // The interrupt shadow alone: the other bit shows a guest's IF to an exit.
    to.int_state = from.int_state & x86::vmcb::INT_SHADOW;
    // As it is: type and vector were checked, and what the CPU finds wrong beside is an exit that L1 sees.
    to.event_inj = from.event_inj;
    // It is an exit's field: what L1 left there must not be taken for an event of L2's.
    to.exit_int_info = 0;
    // L1's command was looked at: it is about L1's ids.
    to.tlb_ctl = 0;
    // Without records of its own L2 has L1's, which its block shows where L1 has any recorded.
    // The bit may be on in block 02 for L1's records, which L2 shares: that is left as it is.
    let branches =
        if has_branch_records(from, offered) { VIRTUAL_LBR } else { to.virt_ext & VIRTUAL_LBR };
    let moves = if moves_by_cpu(from, offered) { VIRTUAL_VMLOAD } else { 0 };
    let changed = to.virt_ext ^ (branches | moves);
    to.virt_ext ^= changed;
    stale.set(Clean::LBR, changed != 0);
    // No clean bit names it. A CPU that kept it would carry out L2's VMLOAD and VMSAVE as L1's.
    if changed & VIRTUAL_VMLOAD != 0 { all() } else { stale }
}

/// All groups. Out of the way of each entry, which would be compiled twice for the constant.
#[cold]
#[inline(never)]
fn all() -> Clean {
    Clean::ALL
}

/// PAUSE filter of L2: the one of L1 if it asked to hear of PAUSE, else L0's.
fn pause(from: &Control, l0: &L0, offered: &Offered) -> (u16, u16) {
    let [_, _, _, third, ..] = from.intercepts;
    if third & Intercept3::PAUSE.bits() == 0 {
        // L0's filter counts where L1 does not ask for PAUSE: the exit is L0's then.
        return l0.pause;
    }
    // 0 for what L1's CPUID does not offer: the CPU would filter by a field that L1 takes for reserved.
    let threshold = if offered.pause_threshold { from.pause_filter_thresh } else { 0 };
    let count = if offered.pause_filter { from.pause_filter_count } else { 0 };
    (threshold, count)
}

fn paging(to: &mut Vmcb, v12: &Vmcb, l0: &L0) -> Clean {
    // Under shadow paging who keeps L2's tables writes the root.
    let Some(root) = l0.root else { return Clean::empty() };
    let own = v12.control.np_ctl & NP_ENABLE != 0;
    let pat = if own { v12.save.g_pat } else { l0.pat };
    // On whatever L1 asks: without nested paging of its own L2 goes through the tables that L0 has for L1.
    let changed = put(&mut to.control.np_ctl, NP_ENABLE)
        | put(&mut to.control.ncr3, root.0)
        | put(&mut to.save.g_pat, pat);
    if changed { Clean::NPT } else { Clean::empty() }
}

/// The save area: what VMRUN loads (APM vol. 2 §15.5.1). FS, GS, TR, LDTR, KernelGSBase and the SYSCALL and
/// SYSENTER MSRs are L1's until it executes VMLOAD.
fn registers(to: &mut Save, from: &Save, dirty: Clean) -> Clean {
    // Each of these changes from run to run: a comparison would be as long as the store.
    to.rax = from.rax;
    to.rsp = from.rsp;
    to.rip = from.rip;
    // Every CPU has the bit set, and L1 may have left it out.
    to.rflags = from.rflags | Rflags::FIXED.bits();
    let mut stale = Clean::empty();
    if dirty.contains(Clean::CR) {
        // ET is fixed to 1 in every CPU that has SVM.
        let cr0 = from.cr0 | Cr0::ET.bits();
        let changed = put(&mut to.cr0, cr0)
            | put(&mut to.cr3, from.cr3)
            | put(&mut to.cr4, from.cr4)
            | put(&mut to.efer, from.efer);
        stale.set(Clean::CR, changed);
    }
    if dirty.contains(Clean::SEG) {
        use x86::vmcb::{SEG_CS, SEG_DS, SEG_ES, SEG_SS};
        // L1 writes a byte there.
        let mut changed = put(&mut to.cpl, from.cpl & 3);
        for at in [SEG_ES, SEG_CS, SEG_SS, SEG_DS] {
            changed |= segment(to, from, at);
        }
        stale.set(Clean::SEG, changed);
    }
    if dirty.contains(Clean::DT) {
        use x86::vmcb::{SEG_GDTR, SEG_IDTR};
        let changed = segment(to, from, SEG_GDTR) | segment(to, from, SEG_IDTR);
        stale.set(Clean::DT, changed);
    }
    if dirty.contains(Clean::DR) {
        let changed =
            // Fixed bits are put in: L1 may have left them out, and the debug registers show them to L2.
            put(&mut to.dr6, Dr6::new(from.dr6).bits()) | put(&mut to.dr7, from.dr7 | 0x400);
        stale.set(Clean::DR, changed);
    }
    if dirty.contains(Clean::CR2) {
        // CR2 has a clean bit of its own, and no CPU checks it.
        stale.set(Clean::CR2, put(&mut to.cr2, from.cr2));
    }
    stale
}

/// DEBUGCTL and the records, whatever is clean: between two runs block 02 may have had L1's.
fn branch_records(to: &mut Vmcb, v12: &Vmcb, offered: &Offered) -> Clean {
    if !has_branch_records(&v12.control, offered) {
        return Clean::empty();
    }
    let changed = copy_branch_records(&mut to.save, &v12.save);
    if changed { Clean::LBR } else { Clean::empty() }
}

fn segment(to: &mut Save, from: &Save, at: usize) -> bool {
    // The indices are constants of ours; `get` spares the panic that they cannot cause.
    let (Some(to), Some(from)) = (to.segments.get_mut(at), from.segments.get(at)) else {
        return false;
    };
    // Two words are compared quicker than four fields.
    let ([a, b], [c, d]): ([u64; 2], [u64; 2]) = (transmute!(*to), transmute!(*from));
    let changed = (a ^ c) | (b ^ d) != 0;
    if changed {
        *to = *from;
    }
    changed
}

/// Sets the intercepts; true if that changed them. By words: a comparison of the arrays is a call.
fn put_intercepts(to: &mut [u32; 6], words: [u32; 6]) -> bool {
    let ([a, b, c], [d, e, f]): ([u64; 3], [u64; 3]) = (transmute!(*to), transmute!(words));
    let changed = (a ^ d) | (b ^ e) | (c ^ f) != 0;
    if changed {
        *to = words;
    }
    changed
}
