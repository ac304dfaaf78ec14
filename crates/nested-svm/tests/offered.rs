//! What a CPU does for L2 by itself if L1 asks for it and was offered it: a GIF of L2's own, VMLOAD and VMSAVE.

use core::cell::RefCell;

use gannet_nested_svm::{
    L1Memory, Offered, Outside,
    leave::{self, Left, Undelivered},
    merge,
    reflect::{self, Exit},
    saved,
    vmcb12::Vmcb12,
};
use x86::vmcb::{Clean, ExitCode, Intercept4, NP_ENABLE, VIRTUAL_VMLOAD, Vmcb, event, vintr};
use x86::{Gpa, Hpa};
use zerocopy::{FromZeros, IntoBytes};

const OFFERED: Offered = Offered {
    physical_bits: 48,
    flush_by_asid: true,
    npt: true,
    nrip_save: true,
    decode_assists: true,
    pause_filter: true,
    pause_threshold: true,
    vgif: true,
    virtual_vmload: true,
    wide_sysenter: false,
    lbr: false,
    vnmi: false,
    cr4: u64::MAX,
    efer: u64::MAX,
};
const NOTHING: Offered = Offered { vgif: false, virtual_vmload: false, ..OFFERED };
const FLAG: u32 = Intercept4::STGI.bits() | Intercept4::CLGI.bits();
const MOVES: u32 = Intercept4::VMLOAD.bits() | Intercept4::VMSAVE.bits();
const GIF: u32 = vintr::GIF | vintr::GIF_ENABLE;

struct Block(RefCell<Vmcb>);

impl L1Memory for Block {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        let block = self.0.borrow();
        let from = at.0 as usize;
        into.copy_from_slice(block.as_bytes().get(from..from + into.len()).ok_or(Outside)?);
        Ok(())
    }
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        let (mut block, to) = (self.0.borrow_mut(), at.0 as usize);
        let to = block.as_mut_bytes().get_mut(to..to + from.len()).ok_or(Outside)?;
        to.copy_from_slice(from);
        Ok(())
    }
}

fn l0() -> merge::L0 {
    merge::L0 {
        intercepts: [0, 0, 0, 0, FLAG | MOVES, 0],
        tsc_offset: 0,
        iopm: Hpa(0x1000),
        msrpm: Hpa(0x2000),
        root: Some(Hpa(0x3000)),
        pat: 0x0007_0406_0007_0406,
        pause: (0, 0),
        l1_interrupts: true,
    }
}

/// An exit of L2's for CPUID, with block 02 as it is in `from`.
fn leaves(memory: &Block, copy: &Vmcb12, from: &Vmcb) {
    let exit = Exit::plain(ExitCode::Cpuid);
    let undelivered = Undelivered::default();
    let left = Left { from, cr0_hidden: 0, exit: &exit, undelivered, entered: true };
    leave::write(memory, copy, &left, &OFFERED).unwrap();
}

/// Block 02 of such a VMCB12: `int_ctl`, the fourth word of intercepts, and the extensions.
fn entered(v12: &Vmcb, offered: &Offered) -> (u32, u32, u64) {
    let mut b02 = Vmcb::new_zeroed();
    merge::enter(&mut b02, v12, Clean::ALL, &l0(), offered);
    let control = &b02.control;
    (control.int_ctl & GIF, control.intercepts[4] & (FLAG | MOVES), control.virt_ext)
}

#[test]
fn a_gif_of_l2s_own_makes_no_exits_of_ours() {
    let mut v12 = Vmcb::new_zeroed();
    v12.control.int_ctl = GIF;
    assert_eq!(entered(&v12, &OFFERED), (GIF, MOVES, 0));
    assert_eq!(entered(&v12, &NOTHING), (0, FLAG | MOVES, 0));
    // The flag alone means nothing.
    v12.control.int_ctl = vintr::GIF;
    assert_eq!(entered(&v12, &OFFERED), (0, FLAG | MOVES, 0));
    // What L1 intercepts exits all the same.
    v12.control.int_ctl = GIF;
    v12.control.intercepts[4] = Intercept4::STGI.bits();
    assert_eq!(entered(&v12, &OFFERED).1, Intercept4::STGI.bits() | MOVES);
}

#[test]
fn vmload_of_l2_is_the_cpus_through_tables_of_l1s_alone() {
    let mut v12 = Vmcb::new_zeroed();
    v12.control.virt_ext = VIRTUAL_VMLOAD;
    assert_eq!(entered(&v12, &OFFERED), (0, FLAG | MOVES, 0), "the addresses are L1's own");
    v12.control.np_ctl = NP_ENABLE;
    assert_eq!(entered(&v12, &OFFERED), (0, FLAG, VIRTUAL_VMLOAD));
    assert_eq!(entered(&v12, &NOTHING), (0, FLAG | MOVES, 0));
    // The CPU would move half of SYSENTER's addresses: L1, whose tables the addresses go through, hears of both.
    let wide = Offered { wide_sysenter: true, ..OFFERED };
    assert_eq!(entered(&v12, &wide), (0, FLAG | MOVES, 0));
    for code in [ExitCode::Vmload, ExitCode::Vmsave] {
        let exit = Exit::plain(code);
        let memory = Block(RefCell::new(Vmcb::new_zeroed()));
        assert_eq!(reflect::claims(&v12.control, &wide, &exit, &memory), reflect::Claim::L1);
    }
    v12.control.intercepts[4] = Intercept4::VMSAVE.bits();
    assert_eq!(entered(&v12, &OFFERED).1, FLAG | Intercept4::VMSAVE.bits());
}

/// No group of clean bits is known to hold it.
#[test]
fn when_vmload_becomes_the_cpus_or_no_longer_is_nothing_is_clean() {
    let mut v12 = Vmcb::new_zeroed();
    v12.control.np_ctl = NP_ENABLE;
    let mut b02 = Vmcb::new_zeroed();
    let mut stale = |virt_ext| {
        v12.control.virt_ext = virt_ext;
        merge::enter(&mut b02, &v12, Clean::ALL, &l0(), &OFFERED)
    };
    stale(0);
    for (virt_ext, all) in [(0, false), (VIRTUAL_VMLOAD, true), (VIRTUAL_VMLOAD, false), (0, true)]
    {
        assert_eq!(stale(virt_ext) == Clean::ALL, all);
    }
}

#[test]
fn l1_finds_the_gif_that_l2_has_left() {
    for (b02, wanted) in [(vintr::GIF_ENABLE, vintr::GIF_ENABLE), (GIF, GIF), (0, GIF)] {
        let mut v12 = Vmcb::new_zeroed();
        v12.control.int_ctl = GIF;
        let memory = Block(RefCell::new(v12));
        let mut copy = Vmcb12::new();
        copy.load(&memory, Gpa(0)).unwrap();
        let mut from = Vmcb::new_zeroed();
        from.control.int_ctl = b02;
        leaves(&memory, &copy, &from);
        assert_eq!(memory.0.borrow().control.int_ctl & GIF, wanted);
        let (mut page, b01) = (Vmcb::new_zeroed(), Vmcb::new_zeroed());
        saved::data(&mut page, &copy, (&b01, 0), &from.control, None);
        assert_eq!(page.control.int_ctl & GIF, wanted, "in a saved state");
    }
}

/// A software interrupt that L1 injects goes on where a CPU with these features has it: at NRIP, or at RIP. What an exit before
/// has left, perhaps another L2's, is nobody's.
#[test]
fn an_injected_int_n_returns_to_rip_without_nrip() {
    let mut v12 = Vmcb::new_zeroed();
    (v12.save.rip, v12.control.next_rip) = (0x1002, 0x7777);
    v12.control.event_inj = event::VALID | 4 << 8 | 0x80;
    for (nrip_save, wanted) in [(true, 0x7777), (false, 0x1002)] {
        let mut b02 = Vmcb::new_zeroed();
        b02.control.next_rip = 0x5555;
        merge::enter(&mut b02, &v12, Clean::ALL, &l0(), &Offered { nrip_save, ..OFFERED });
        assert_eq!(b02.control.next_rip, wanted);
    }
}

/// A PAT that L2 has not changed stays as L1 has it in its block: a state that stock KVM saved brings L1's.
#[test]
fn the_pat_in_l1s_block_is_l2s_if_l2_has_set_it() {
    const OF_L1: u64 = 0x0407_0506_0007_0106;
    const IN_BLOCK: u64 = 0x0007_0406_0007_0406;
    for (set, wanted) in [(OF_L1, IN_BLOCK), (6, 6)] {
        let mut v12 = Vmcb::new_zeroed();
        v12.control.np_ctl = NP_ENABLE;
        v12.save.g_pat = IN_BLOCK;
        let memory = Block(RefCell::new(v12));
        let mut copy = Vmcb12::new();
        copy.load(&memory, Gpa(0)).unwrap();
        copy.registers().g_pat = OF_L1;
        let mut from = Vmcb::new_zeroed();
        from.save.g_pat = set;
        leaves(&memory, &copy, &from);
        assert_eq!(memory.0.borrow().save.g_pat, wanted);
    }
}
