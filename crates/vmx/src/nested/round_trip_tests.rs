//! L1 and L2 in turns over the model CPU, on CPUs that the vCPU leaves and comes back to.

extern crate std;
use super::*;
use crate::features::{Controls, Features};
use crate::{fields, percpu};
use backend::{
    ControlRegisters, DeadlineWatch, GuestLimits, LiveRegisters as _, Msrs as _, Nested as _,
    Onward, Outside, Permissions, Reach, Registers, SegmentName, Translation, Turn, WorldSwitch,
};
use core::cell::{Cell, RefCell};
use core::sync::atomic::Ordering::Relaxed;
use cpu::{Counting, Model, ModelVmcs, VmxCpu};
pub(super) use nested_vmx::example::good;
use nested_vmx::{Vmcs12, example::EVERYTHING, set};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::vec::Vec;
use x86::vmcs::{
    EntryControls, ExitControls, ExitReason, PinControls, ProcControls, ProcControls2, field,
};
use x86::{Direction, Gpa, Hpa, Segment, msr};
use zerocopy::IntoBytes;

pub(super) struct Mem {
    pub(super) bytes: RefCell<Vec<u8>>,
    pub(super) whole: Cell<bool>,
    /// A page that cannot be had; 0: none.
    pub(super) hole: Cell<u64>,
}
impl L1Memory for Mem {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        if self.hole.get() != 0 && self.hole.get() == at.0 & !0xfff {
            return Err(Outside);
        }
        let at = at.0 as usize;
        into.copy_from_slice(self.bytes.borrow().get(at..at + into.len()).ok_or(Outside)?);
        Ok(())
    }
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        let at = at.0 as usize;
        self.bytes.borrow_mut().get_mut(at..at + from.len()).ok_or(Outside)?.copy_from_slice(from);
        Ok(())
    }
    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside> {
        let mut now = [0; 8];
        self.read(at, &mut now)?;
        let same = u64::from_le_bytes(now) == old;
        if same { self.write(at, &new.to_le_bytes()).map(|()| true) } else { Ok(false) }
    }
    fn translate(&self, linear: u64, _: Direction) -> Result<Gpa, Reach> {
        if self.whole.get() { Ok(Gpa(linear)) } else { Err(Reach::Outside) }
    }
    fn is_final(&self) -> bool {
        self.whole.get()
    }
}

fn all<B: bitflags::Flags + Copy>(base: B) -> Controls<B> {
    Controls { base, may: B::all() }
}

pub(super) fn features() -> Features {
    Features {
        ept: true,
        revision: 4,
        pin: all(PinControls::EXTERNAL_INTERRUPT | PinControls::NMI | PinControls::VIRTUAL_NMIS),
        primary: all(ProcControls::HLT
            | ProcControls::TPR_SHADOW
            | ProcControls::MSR_BITMAPS
            | ProcControls::UNCONDITIONAL_IO
            | ProcControls::MOV_DR
            | ProcControls::SECONDARY),
        secondary: all(ProcControls2::EPT
            | ProcControls2::VPID
            | ProcControls2::UNRESTRICTED_GUEST),
        exit: all(ExitControls::HOST_64 | ExitControls::LOAD_EFER | ExitControls::LOAD_PAT),
        entry: all(EntryControls::LOAD_EFER | EntryControls::LOAD_PAT),
        cr0_fixed: x86::Cr0::PG | x86::Cr0::NE | x86::Cr0::PE,
        cr4_fixed: x86::Cr4::VMXE,
        cr4_allowed: x86::Cr4::from_bits_retain(u64::MAX),
        vpid: true,
        invvpid_single: true,
        invept_single: true,
        ept_dirty: true,
        rdtscp: true,
        spec_ctrl: true,
        xsave: true,
        nested: true,
        shadow_vmcs: true,
        nested_host: EVERYTHING,
        interrupt_status: true,
        nested_virtual_interrupts: true,
        ..Features::default()
    }
}

const VMXON_AT: u64 = 0x1_0000;
const VMCS_AT: u64 = 0x1_1000;
const PTR: u64 = 0x100;

/// A CPU of the host's.
fn model() -> Model {
    let mut model = Model::default();
    model.vmx.writes_read_only = true;
    model.xcr0 = 7;
    model.msrs.insert(x86::vmcs::capability::FEATURE_CONTROL, 5);
    for (at, value) in
        [(msr::STAR, 0x1111), (msr::LSTAR, 0xffff_ffff_8200_0080), (msr::SYSCALL_MASK, 3)]
    {
        model.wrmsr(at, value);
    }
    model.host = model.moved;
    model
}

/// CPUs are one process's: a test has them alone.
static CPUS: Mutex<()> = Mutex::new(());

pub(super) struct Rig {
    pub(super) v: Vmx<Counting<Model>>,
    pub(super) g: Gprs,
    pub(super) m: Mem,
    pub(super) root: bool,
    /// Behind the vCPU, which clears its VMCSs when it is dropped.
    _alone: MutexGuard<'static, ()>,
}

/// There is room for so many VMCSs on a CPU, and CPUs outlast a test.
impl Drop for Rig {
    fn drop(&mut self) {
        self.clear_all();
    }
}

impl Rig {
    /// What a CPU does that is asked for its VMCSs: here there is none to be asked.
    fn clear_all(&mut self) {
        let mut all = std::vec![self.v.vmcs.hpa()];
        all.extend(self.v.nested.iter().flat_map(|n| n.beside()).map(|vmcs| vmcs.hpa()));
        for at in all {
            for cpu in (0..4).filter_map(percpu::of) {
                cpu.clear(self.v.cpu(), at);
            }
        }
    }

    /// A saved state is found good and restored.
    pub(super) fn restore(&mut self, bytes: &[u8], smm: bool) {
        use backend::NestedState as _;
        let checked = self.v.check_state(bytes, smm, &self.m).unwrap();
        self.v.restore_state(&mut self.g, checked, &self.m);
    }

    pub(super) fn new(vmcs12: &Vmcs12, efer: u64) -> Self {
        Self::on(features(), vmcs12, efer)
    }

    pub(super) fn on(f: Features, vmcs12: &Vmcs12, efer: u64) -> Self {
        let alone = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = percpu::set_up(f, 4);
        host::std_port::test::set_cpu(0);
        // The vCPU moves to another, and has its model go with it.
        percpu::enable(&mut model(), 1).unwrap();
        let mut c = Counting::new(model());
        percpu::enable(&mut c, 0).unwrap();
        let mut v = Vmx::new(c, f).unwrap();
        v.set_limits(GuestLimits {
            cr4_allowed: Cr4::from_bits_retain(0x77_27ff),
            efer_allowed: 0xd01,
            maxphyaddr: 40,
            vmx: true,
            xsave: true,
            tsc_aux: true,
            ..GuestLimits::default()
        });
        v.set_tdp_root(Hpa(0x7000));
        v.set_feature_control(5);
        v.set_efer(Efer::from_bits_retain(efer));
        v.set_cr4(Cr4::from_bits_retain(0x2020));
        v.set_cr0(Cr0::from_bits_retain(0x8005_0033));
        v.set_segment(
            SegmentName::Cs,
            Segment { base: 0, limit: u32::MAX, selector: 8, attr: 0xa9b },
        );
        v.set_segment(
            SegmentName::Ss,
            Segment { base: 0, limit: u32::MAX, selector: 16, attr: 0xc93 },
        );
        let m = Mem {
            bytes: RefCell::new(std::vec![0; 0x2_0000]),
            whole: Cell::new(true),
            hole: Cell::new(0),
        };
        let mut this = Self { _alone: alone, v, g: Gprs::default(), m, root: false };
        let revision = x86::vmcs::place::VMCS12_REVISION;
        this.m.write(Gpa(VMXON_AT), &revision.to_le_bytes()).unwrap();
        this.m.write(Gpa(VMCS_AT), vmcs12.as_bytes()).unwrap();
        this.m.write(Gpa(VMCS_AT), &revision.to_le_bytes()).unwrap();
        for (pointer, reason) in [(VMXON_AT, ExitReason::Vmxon), (VMCS_AT, ExitReason::Vmptrld)] {
            this.m.write(Gpa(PTR), &pointer.to_le_bytes()).unwrap();
            this.v.load(0);
            this.enter(reason, |v| {
                v.set(field::EXIT_QUALIFICATION, PTR);
                v.set(field::INSTRUCTION_INFO, 1 << 27 | 1 << 22 | 2 << 7 | 3 << 15);
            });
            this.v.complete(&mut this.g);
            this.v.unload(Onward::ToGuest);
            assert_eq!(this.v.execute(&mut this.g, 0, &this.m), Executed::Retired);
        }
        this.v.load(0);
        this.m.whole.set(false);
        this
    }

    /// One run of the guest, and its exit.
    pub(super) fn enter(
        &mut self,
        reason: ExitReason,
        then: impl Fn(&mut ModelVmcs) + Send + 'static,
    ) {
        self.v.cpu().inner().vmx.then(move |v, _| {
            v.set(field::EXIT_REASON, reason.0.into());
            v.set(field::EXIT_QUALIFICATION, 0);
            v.set(field::IDT_VECTORING, 0);
            v.set(field::INSTRUCTION_LENGTH, 3);
            then(v);
        });
        self.v.enter(&mut self.g);
    }

    /// L1 executes VMLAUNCH or VMRESUME.
    pub(super) fn go(&mut self, reason: ExitReason) -> Executed {
        self.enter(reason, |_| {});
        let done = self.v.execute(&mut self.g, 0, &self.m);
        if self.root {
            backend::NestedPaging::set_nested_root(&mut self.v, Hpa(0x9000), false);
        }
        done
    }

    /// L2 exits by CPUID, and L1 resumes it, having changed nothing.
    pub(super) fn round(&mut self, in_l2: impl Fn(&mut ModelVmcs) + Send + 'static) {
        self.enter(ExitReason::Cpuid, in_l2);
        assert_eq!(self.v.reflect(&mut self.g, &self.m), Executed::Left);
        assert_eq!(self.go(ExitReason::Vmresume), Executed::Entered);
    }

    /// L2 runs, and everything is composed.
    pub(super) fn settle(&mut self) {
        assert_eq!(self.go(ExitReason::Vmlaunch), Executed::Entered);
        for _ in 0..3 {
            self.round(|_| {});
        }
    }

    fn mirror(&mut self) -> Hpa {
        self.v.nested.as_ref().unwrap().shadow.as_ref().unwrap().vmcs.hpa()
    }

    /// Whether the bitmap lets L1's VMWRITE of a field go to the shadow VMCS.
    pub(super) fn is_written_without_exit(&self, encoding: u32) -> bool {
        let bitmap = &self.v.nested.as_ref().unwrap().shadow.as_ref().unwrap().writes;
        bitmap.bytes()[encoding as usize >> 3].load(Relaxed) & 1 << (encoding & 7) == 0
    }

    /// L1 executes VMWRITE, which the shadow VMCS serves: no exit.
    pub(super) fn l1_vmwrite(&mut self, encoding: u32, value: u64) {
        assert!(self.is_written_without_exit(encoding));
        let (mirror, own) = (self.mirror(), self.v.vmcs.hpa());
        let n = self.v.nested.as_ref().unwrap();
        assert!(n.shadow.as_ref().unwrap().serves);
        let c = self.v.cpu();
        c.vmptrld(mirror);
        c.vmwrite(encoding, value);
        c.vmptrld(own);
    }
}

/// A program of L1's at CPL 3 executes VMRESUME, and gets its #GP. What L1's kernel writes afterwards by VMWRITE is
/// what its next VMRESUME has to enter with.
#[test]
fn a_vmresume_at_cpl3_costs_l1_no_vmwrite() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    // The program.
    r.enter(ExitReason::Vmresume, |v| v.set(field::GUEST_SS_RIGHTS, 0xc0f3));
    let done = r.v.execute(&mut r.g, 0, &r.m);
    assert_eq!(done, Executed::Fault(x86::Exception::gp(0)));
    // The kernel: RIP behind CPUID, an NMI to be injected.
    r.enter(ExitReason::Hlt, |v| v.set(field::GUEST_SS_RIGHTS, 0xc093));
    r.l1_vmwrite(field::GUEST_RIP.encoding(), 0x7777);
    r.l1_vmwrite(field::ENTRY_INTERRUPTION.encoding(), 0x8000_0202);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    let (rip, info) = (r.v.get(fields::GUEST_RIP), r.v.get(fields::ENTRY_INTERRUPTION));
    assert_eq!((rip, info), (0x7777, 0x8000_0202));
}

/// Each run has the thread's own CR3 for the host, whichever level an exit leaves, and also where the run before had both.
#[test]
fn both_levels_leave_to_the_thread_that_runs() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    for cr3 in [0x5000u64, 0x6000, 0x5000] {
        r.leave_loop();
        r.v.cpu().inner().vmx.cr3 = cr3;
        r.v.load(0);
        for _ in 0..2 {
            r.enter(ExitReason::Cpuid, move |v| assert_eq!(v.get(field::HOST_CR3), cr3));
            assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
            r.enter(ExitReason::Vmresume, move |v| assert_eq!(v.get(field::HOST_CR3), cr3));
            assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
        }
    }
}

/// The VMM saves the state between L1's VMWRITE of an event and its VMRESUME: L2 gets the event all the same.
#[test]
fn what_l1_asks_for_is_not_lost_by_saving() {
    use backend::NestedState as _;
    extern crate std;
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    r.enter(ExitReason::Hlt, |_| {});
    r.l1_vmwrite(field::ENTRY_INTERRUPTION.encoding(), 0x8000_0041);
    r.leave_loop();
    let mut state = std::vec![0; r.v.state_size()];
    r.v.save_state(&r.g, &mut state, &r.m).unwrap();
    r.v.load(0);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(r.v.get(fields::ENTRY_INTERRUPTION), 0x8000_0041);
}

/// The control: the same without the program.
#[test]
fn without_it_they_count() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    r.enter(ExitReason::Hlt, |_| {});
    r.l1_vmwrite(field::GUEST_RIP.encoding(), 0x7777);
    r.l1_vmwrite(field::ENTRY_INTERRUPTION.encoding(), 0x8000_0202);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    let (rip, info) = (r.v.get(fields::GUEST_RIP), r.v.get(fields::ENTRY_INTERRUPTION));
    assert_eq!((rip, info), (0x7777, 0x8000_0202));
}

/// VMfail of VMRESUME (not launched) and then VMWRITE.
#[test]
fn a_vmfail_costs_l1_no_vmwrite() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Retired);
    r.enter(ExitReason::Hlt, |_| {});
    r.l1_vmwrite(field::GUEST_RIP.encoding(), 0x7777);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    assert_eq!(r.v.get(fields::GUEST_RIP), 0x7777);
}

/// An entry that fails inside the loop loads EFER.SCE: SYSCALL of L1's goes to L1's LSTAR, not to the host's.
#[test]
fn an_entry_that_fails_leaves_no_lstar_of_the_hosts() {
    let mut bad = good();
    bad.set(field::GUEST_RFLAGS, 0);
    let mut r = Rig::new(&bad, 0xd00);
    r.v.set_msr(msr::LSTAR, 0x1234).unwrap();
    assert_eq!(r.v.cpu().rdmsr(msr::LSTAR), 0xffff_ffff_8200_0080, "EFER.SCE is clear");
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Left);
    assert!(r.v.vmcs.is_loaded());
    assert!(ControlRegisters::efer(&r.v).contains(Efer::SCE));
    // L1 runs with SCE from here on.
    r.enter(ExitReason::Hlt, |v| assert_eq!(v.get(field::GUEST_EFER), 0xd01));
    assert_eq!(r.v.cpu().rdmsr(msr::LSTAR), 0x1234);
}

/// L1 takes "load IA32_EFER" from L2's VMCS, whose SCE L1 itself has not: the CPU has the host's LSTAR then, which L2's SYSCALL
/// would lead to. The model CPU refuses an entry with the one and the other.
#[test]
fn an_l2_without_an_efer_of_its_own_has_no_lstar_of_the_hosts() {
    let mut v12 = good();
    let loads = EntryControls::LOAD_PAT | EntryControls::LOAD_DEBUG | EntryControls::LOAD_EFER;
    let saves = ExitControls::SAVE_PAT | ExitControls::SAVE_DEBUG | ExitControls::SAVE_EFER;
    let entry = v12.get(field::ENTRY_CONTROLS) | loads.bits();
    let exit = v12.get(field::EXIT_CONTROLS) | saves.bits();
    set!(v12, ENTRY_CONTROLS = entry, EXIT_CONTROLS = exit, HOST_EFER = 0xd00);
    let mut r = Rig::new(&v12, 0xd00);
    r.v.set_msr(msr::LSTAR, 0x1234).unwrap();
    r.settle();
    r.enter(ExitReason::Cpuid, |v| assert_eq!(v.get(field::GUEST_EFER), 0xd01));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    // The thread has been to user space.
    r.leave_loop();
    percpu::user_return(r.v.cpu(), 0);
    r.come_to(0);
    let entry = entry & !EntryControls::LOAD_EFER.bits();
    (r.g.0[0], r.g.0[2]) = (entry.into(), field::ENTRY_CONTROLS.encoding().into());
    r.enter(ExitReason::Vmwrite, |v| v.set(field::INSTRUCTION_INFO, 1 << 10 | 2 << 28));
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Retired);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.enter(ExitReason::Cpuid, |v| assert_eq!(v.get(field::GUEST_EFER) & 1, 0));
}

/// L2 sets CR4.OSXSAVE and CR0.CD by itself, exits, and is resumed with nothing changed.
#[test]
fn what_l2_made_of_cr4_is_known_after_a_round_trip() {
    let mut r = Rig::new(&good(), 0xd01);
    r.v.set_xcr0(3);
    r.settle();
    r.enter(ExitReason::CrAccess, |_| {});
    let new = ControlRegisters::cr4(&r.v) | Cr4::OSXSAVE;
    let new = r.v.cr4_of_write(new).unwrap();
    r.v.set_cr4(new);
    assert_eq!(r.v.cpu().inner().xcr0, 3);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    let hardware = Cr4::from_bits_retain(r.v.get(fields::GUEST_CR4));
    std::println!(
        "hardware {hardware:?} L0 {:?} xcr0 {}",
        ControlRegisters::cr4(&r.v),
        r.v.cpu().inner().xcr0
    );
    assert!(hardware.contains(Cr4::OSXSAVE));
    assert!(ControlRegisters::cr4(&r.v).contains(Cr4::OSXSAVE), "L0 has forgotten");
    assert_eq!(r.v.cpu().inner().xcr0, 3, "L2 runs with the host's XCR0");
}

/// L2, an unrestricted guest with tables of L1's, switches paging on.
#[test]
fn what_l2_made_of_cr0_is_known_after_a_round_trip() {
    let mut v12 = good();
    let two = ProcControls2::EPT | ProcControls2::UNRESTRICTED_GUEST;
    set!(
        v12,
        PROC_CONTROLS2 = two.bits(),
        GUEST_CR0 = 0x31,
        GUEST_CR4 = 0x2000,
        GUEST_EFER = 0,
        ENTRY_CONTROLS = 0x11fb | 1 << 15,
        GUEST_CS_RIGHTS = 0xc09b
    );
    v12.set(field::EPT_POINTER, 0x3000 | 3 << 3 | 6);
    let mut r = Rig::new(&v12, 0xd01);
    r.root = true;
    r.settle();
    r.enter(ExitReason::CrAccess, |_| {});
    let new = r.v.cr0_of_write(Cr0::from_bits_retain(0x8000_0031)).unwrap();
    r.v.set_cr0(new);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    let hardware = Cr0::from_bits_retain(r.v.get(fields::GUEST_CR0));
    std::println!("hardware {hardware:?} L0 {:?}", ControlRegisters::cr0(&r.v));
    assert!(hardware.contains(Cr0::PG));
    assert!(ControlRegisters::cr0(&r.v).contains(Cr0::PG), "L0 believes that L2 does not page");
}

/// L2 loads CR3, which does not exit. L1 changes nothing. The vCPU's thread has moved to another CPU and back, so
/// that L2's VPID is another.
#[test]
fn l2_keeps_its_cr3_when_its_vpid_changes() {
    let mut r = Rig::new(&good(), 0xd01);
    r.settle();
    r.round(|v| v.set(field::GUEST_CR3, 0x5000));
    assert_eq!(r.v.get(fields::GUEST_CR3), 0x5000, "nothing has happened");
    // What `arrive` and INVVPID do.
    r.v.vmcs.drop_vpid();
    r.v.flush_tlb();
    r.round(|v| v.set(field::GUEST_CR3, 0x6000));
    let first = r.v.get(fields::GUEST_CR3);
    r.round(|v| v.set(field::GUEST_CR3, 0x6000));
    let second = r.v.get(fields::GUEST_CR3);
    r.round(|v| assert_eq!(v.get(field::GUEST_CR3), 0x6000, "L2 runs with CR3 of long ago"));
    assert_eq!((first, second), (0x6000, 0x6000));
}

impl Rig {
    /// The thread leaves the loop and goes to another CPU.
    pub(super) fn leave_loop(&mut self) {
        self.v.complete(&mut self.g);
        self.v.unload(Onward::ToGuest);
        self.m.whole.set(true);
    }

    pub(super) fn come_to(&mut self, cpu: usize) {
        if !self.v.may_run_on(cpu) {
            self.v.release_elsewhere();
            self.clear_all();
            self.v.cpu().inner().vmx.come_to_another_cpu();
        }
        host::std_port::test::set_cpu(cpu);
        self.m.whole.set(false);
        self.v.load(cpu);
    }

    pub(super) fn invepts(&mut self) -> u64 {
        self.v.cpu().counts().of(cpu::Op::Invept)
    }
}

/// The rule, without an L2: whoever comes to a CPU forgets what it left there.
#[test]
fn l1_alone_forgets_when_it_comes_back() {
    let mut r = Rig::new(&good(), 0xd01);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.leave_loop();
    r.come_to(1);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.leave_loop();
    let before = r.invepts();
    r.come_to(0);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_eq!(r.invepts() - before, 1);
}

/// L1 and L2 run on CPU 0. L2 goes on on CPU 1, where a withdrawal of the host's is flushed. Its exit there needs L1's
/// memory, so that L1 becomes current outside of the loop. The thread goes back to CPU 0, and L1 runs there.
#[test]
fn l1_forgets_when_it_comes_back_after_l2_was_elsewhere() {
    let mut v12 = good();
    set!(v12, EXIT_MSR_STORE_COUNT = 1, EXIT_MSR_STORE_ADDR = 0x3000);
    let mut r = Rig::new(&v12, 0xd01);
    r.m.write(Gpa(0x3000), &msr::KERNEL_GS_BASE.to_le_bytes()).unwrap();
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.leave_loop();
    r.come_to(1);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    // The host takes a page back: Request::FlushTlb.
    r.v.flush_tdp();
    let before = r.invepts();
    r.enter(ExitReason::Cpuid, |_| {});
    assert!(r.invepts() > before, "flushed on CPU 1");
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Outside);
    r.leave_loop();
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    let before = r.invepts();
    r.come_to(0);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_ne!(r.invepts() - before, 0, "CPU 0 has what was withdrawn while L2 was on CPU 1");
}

/// What is entered to wait for a startup IPI waits, whatever its priority (SDM vol. 3C §27.7.7).
#[test]
fn an_l2_that_waits_for_a_sipi_does_not_fall_below_the_threshold() {
    const WAIT_FOR_SIPI: u32 = 3;
    let mut v12 = good();
    let primary = v12.get(field::PROC_CONTROLS) | 1 << 21;
    set!(
        v12,
        PROC_CONTROLS = primary,
        PROC_CONTROLS2 = ProcControls2::VIRTUALIZE_APIC_ACCESSES.bits(),
        VIRTUAL_APIC_ADDR = 0x3000,
        APIC_ACCESS_ADDR = 0x4000,
        TPR_THRESHOLD = 5
    );
    assert_eq!(Rig::new(&v12, 0xd01).go(ExitReason::Vmlaunch), Executed::Left);
    set!(v12, GUEST_ACTIVITY = WAIT_FOR_SIPI);
    let done = Rig::new(&v12, 0xd01).go(ExitReason::Vmlaunch);
    assert_eq!(done, Executed::Asleep(backend::Sleep::WaitForSipi));
}

/// The other way: L1 goes to CPU 1 and enters L2 outside of the loop there; L2 goes on on CPU 0.
#[test]
fn l2_forgets_when_it_comes_back_after_l1_was_elsewhere() {
    let mut v12 = good();
    set!(v12, ENTRY_MSR_LOAD_COUNT = 1, ENTRY_MSR_LOAD_ADDR = 0x3000);
    let mut r = Rig::new(&v12, 0xd01);
    r.m.write(Gpa(0x3000), &msr::KERNEL_GS_BASE.to_le_bytes()).unwrap();
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
    r.leave_loop();
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
    r.come_to(0);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.leave_loop();
    r.come_to(1);
    r.v.flush_tdp();
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Outside);
    r.leave_loop();
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
    let before = r.invepts();
    r.come_to(0);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_ne!(r.invepts() - before, 0, "CPU 0 has what was withdrawn while L1 was on CPU 1");
}

/// Both lag: L1 comes back to CPU 0 under the very VPID and EPT pointer that it had there, though what was withdrawn
/// meanwhile was flushed on CPU 1 alone.
#[test]
fn l1_does_not_come_back_to_its_old_vpid_unflushed() {
    let mut v12 = good();
    set!(
        v12,
        PROC_CONTROLS2 = ProcControls2::VPID.bits(),
        VPID = 1,
        EXIT_MSR_STORE_COUNT = 1,
        EXIT_MSR_STORE_ADDR = 0x3000,
        ENTRY_MSR_LOAD_COUNT = 1,
        ENTRY_MSR_LOAD_ADDR = 0x3000
    );
    let mut r = Rig::new(&v12, 0xd01);
    r.m.write(Gpa(0x3000), &msr::KERNEL_GS_BASE.to_le_bytes()).unwrap();
    // L2 has run on CPU 1.
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.leave_loop();
    r.come_to(1);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Outside);
    r.leave_loop();
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
    r.come_to(1);
    r.enter(ExitReason::Cpuid, |_| {});
    r.leave_loop();
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    r.come_to(1);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.leave_loop();
    // L1 runs on CPU 0, and fills its TLB.
    r.come_to(0);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    let tag = (r.v.get(fields::VPID), r.v.get(fields::EPT_POINTER));
    // It resumes L2; the thread goes to CPU 1.
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Outside);
    r.leave_loop();
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Entered);
    r.come_to(1);
    // The host takes a page back.
    r.v.flush_tdp();
    r.enter(ExitReason::Cpuid, |_| {});
    r.leave_loop();
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    // Back to CPU 0.
    let before = r.v.cpu().counts();
    r.come_to(0);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    let counts = r.v.cpu().counts().since(&before);
    let flushes = counts.of(cpu::Op::Invept) + counts.of(cpu::Op::Invvpid);
    let now = (r.v.get(fields::VPID), r.v.get(fields::EPT_POINTER));
    std::println!("{tag:x?} {now:x?} {flushes}");
    assert!(
        now != tag || flushes != 0,
        "VPID and EPT pointer {now:x?} as before, and {flushes} flushes"
    );
}

/// nested_dirty_tracking=0: L2 loads DS by itself.
#[test]
fn l2_keeps_its_segments_without_tracking() {
    let mut r = Rig::new(&good(), 0xd01);
    r.v.nested.as_mut().unwrap().without_tracking = true;
    r.settle();
    r.round(|v| {
        v.set(field::GUEST_FS_BASE, 0x1234_5000);
        v.set(field::GUEST_CR3, 0x5000);
    });
    assert_eq!((r.v.get(fields::GUEST_FS_BASE), r.v.get(fields::GUEST_CR3)), (0x1234_5000, 0x5000));
}

impl Rig {
    pub(super) fn with_pointer(&mut self, reason: ExitReason, pointer: u64) -> Executed {
        self.m.write(Gpa(PTR), &pointer.to_le_bytes()).unwrap();
        self.enter(reason, |v| {
            v.set(field::EXIT_QUALIFICATION, PTR);
            v.set(field::INSTRUCTION_INFO, 1 << 27 | 1 << 22 | 2 << 7 | 3 << 15);
        });
        self.leave_loop();
        let done = self.v.execute(&mut self.g, 0, &self.m);
        self.come_to(0);
        done
    }

    fn lost_after(&mut self, reason: ExitReason, pointer: u64) -> bool {
        assert_eq!(self.go(ExitReason::Vmlaunch), Executed::Entered);
        self.enter(ExitReason::Cpuid, |_| {});
        assert_eq!(self.v.reflect(&mut self.g, &self.m), Executed::Left);
        assert_eq!(self.with_pointer(reason, pointer), Executed::Retired);
        self.enter(ExitReason::Hlt, |_| {});
        self.l1_vmwrite(field::GUEST_RIP.encoding(), 0x7777);
        assert_eq!(self.go(ExitReason::Vmresume), Executed::Entered);
        self.v.get(fields::GUEST_RIP) != 0x7777
    }
}

/// VMCLEAR of some other region: L1 makes another VM while this one's VMCS is current.
#[test]
fn vmclear_of_another_region_costs_l1_no_vmwrite() {
    assert!(!Rig::new(&good(), 0xd01).lost_after(ExitReason::Vmclear, 0x1_5000));
}

/// VMPTRLD of what is current already.
#[test]
fn vmptrld_of_the_current_vmcs_costs_l1_no_vmwrite() {
    assert!(!Rig::new(&good(), 0xd01).lost_after(ExitReason::Vmptrld, VMCS_AT));
}

/// A word of L0's is set while L2 runs, and set back while L1 does: vmcs02 has what L0 says, not what it was composed
/// from at the entry before.
#[test]
fn a_word_that_is_set_and_set_back_reaches_l2() {
    use backend::Clock as _;
    let mut r = Rig::new(&good(), 0xd01);
    r.v.set_tsc(0x1000, backend::TSC_RATIO_ONE);
    r.settle();
    assert_eq!(r.v.get(fields::TSC_OFFSET), 0x1000);
    r.v.set_tsc(0x2000, backend::TSC_RATIO_ONE);
    assert_eq!(r.v.get(fields::TSC_OFFSET), 0x2000);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    r.v.set_tsc(0x1000, backend::TSC_RATIO_ONE);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(r.v.get(fields::TSC_OFFSET), 0x1000);
}

/// A restored state comes with memory of another time: what was made of L1's tables is compared, and flushed.
#[test]
fn a_restored_state_makes_l1s_tables_stale() {
    use backend::NestedState as _;
    let mut r = Rig::new(&good(), 0xd01);
    r.settle();
    r.leave_loop();
    let mut bytes = std::vec![0; r.v.state_size()];
    let g = r.g;
    r.v.save_state(&g, &mut bytes, &r.m).unwrap();
    let n = r.v.nested.as_mut().unwrap();
    (n.made.flush_due, n.flushed) = (false, backend::L1Flush::None);
    r.restore(&bytes, false);
    let n = r.v.nested.as_ref().unwrap();
    assert!(n.made.flush_due && n.flushed == backend::L1Flush::All);
    assert_eq!(r.v.level(), Level::L2);
}

/// L1 uses no VPID, so that an entry forgets what was made of its tables: where they are logged, a dirty flag that it has
/// cleared without INVEPT counts. With a VPID, or without a log, an entry compares nothing.
#[test]
fn an_entry_without_a_vpid_looks_at_flags_that_are_logged_anew() {
    const POINTER: u64 = 0x6000 | 0x5e;
    let ept = ProcControls2::EPT;
    let cases = [
        (ept | ProcControls2::PML, backend::L1Flush::Of(POINTER)),
        (ept, backend::L1Flush::None),
        (ept | ProcControls2::PML | ProcControls2::VPID, backend::L1Flush::None),
    ];
    for (secondary, flushed) in cases {
        let mut v12 = good();
        let primary = v12.get(field::PROC_CONTROLS) | ProcControls::SECONDARY.bits();
        set!(
            v12,
            PROC_CONTROLS = primary,
            PROC_CONTROLS2 = secondary.bits(),
            EPT_POINTER = POINTER,
            PML_ADDRESS = 0x8000,
            VPID = 1
        );
        let mut r = Rig::new(&v12, 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        for _ in 0..2 {
            assert_eq!(backend::NestedPaging::take_l1_flush(&mut r.v), flushed, "{secondary:?}");
            r.round(|_| {});
        }
    }
}

/// An event that L1 injects is whole in vmcs02 alone: it is not taken back before L2 has run.
#[test]
fn what_l1_injects_stays_with_its_entry() {
    let mut v12 = good();
    v12.set(field::ENTRY_INTERRUPTION, 0x8000_0430);
    v12.set(field::ENTRY_INSTRUCTION_LENGTH, 2);
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    assert!(r.v.injects_for_l1());
    r.enter(ExitReason::Cpuid, |_| {});
    let _ = r.v.claims(&r.g, &r.m).unwrap();
    assert!(!r.v.injects_for_l1());
}

/// A deadline was near when L2 was entered, came, and nobody watches another. L2 is not entered with what is left of
/// its timer, which would end its runs at once, ahead of the host's interrupts; the model CPU refuses such an entry.
#[test]
fn l2_comes_back_without_the_timer_of_a_deadline_that_has_come() {
    let mut f = features();
    f.preemption_timer = Some(5);
    f.pin.base |= PinControls::PREEMPTION_TIMER;
    let mut r = Rig::on(f, &good(), 0xd01);
    r.settle();
    let far = field::PREEMPTION_TIMER;
    let due = r.v.guest_tsc_of_now() + 64;
    DeadlineWatch::watch(&mut r.v, due);
    r.enter(ExitReason::PreemptionTimer, move |v| assert!(v.get(far) <= 3));
    DeadlineWatch::watch(&mut r.v, 0);
    // The interrupt of the deadline is L1's.
    r.enter(ExitReason::Cpuid, move |v| assert_eq!(v.get(far), u32::MAX));
    let due = r.v.guest_tsc_of_now() + 64;
    DeadlineWatch::watch(&mut r.v, due);
    r.enter(ExitReason::Cpuid, move |v| assert!(v.get(far) <= 3));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    DeadlineWatch::watch(&mut r.v, 0);
    r.enter(ExitReason::Hlt, move |v| assert_eq!(v.get(far), u32::MAX));
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.enter(ExitReason::Cpuid, move |v| assert_eq!(v.get(far), u32::MAX));
}

impl Vmx<Counting<Model>> {
    fn guest_tsc_of_now(&mut self) -> u64 {
        let host = backend::Clock::host_tsc(self);
        backend::Clock::guest_tsc(self, host)
    }
}

/// L2 executes STI; RDMSR, which L0 answers, and an interrupt ends its run.
#[test]
fn a_shadow_that_is_over_is_not_told() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Rdmsr, |v| v.set(field::GUEST_INTERRUPTIBILITY, 1));
    let next = r.v.next_rip().unwrap();
    r.v.retire(next);
    assert_eq!(r.v.exit_to_l1(&mut r.g, &Waiting::Nmi, None, &r.m), Executed::Left);
    let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
    assert_eq!(v.get(field::GUEST_INTERRUPTIBILITY), 0);
}
