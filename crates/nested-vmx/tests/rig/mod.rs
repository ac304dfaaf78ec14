//! What the machine is driven with, in the tests of the crate and in those beside it: L1's memory and registers, L0's part, and a
//! VMCS of the hardware's.

// Each test has what it needs of it.
#![allow(dead_code)]

use core::cell::{Cell, RefCell};
use std::vec::Vec;

use gannet_nested_vmx::capabilities::Offer;
use gannet_nested_vmx::checks::Limits;
use gannet_nested_vmx::leave::{Exit, Known};
use gannet_nested_vmx::machine::{Cpu, L1, Stop};
use gannet_nested_vmx::merge::{self, Fields, Pages, time::Tsc};
use gannet_nested_vmx::{Capabilities, GuestMemory, Outside};
use x86::vmcs::field::{Field, Width};
use x86::vmcs::{EntryControls, ExitControls, PinControls, ProcControls, ProcControls2, ReadWrite};
use x86::{Exception, Gpa, Hpa};

use super::example::EVERYTHING;

/// Memory from address 0 on. Linear addresses are physical ones.
pub struct Memory {
    pub bytes: RefCell<Vec<u8>>,
    /// How often each byte was read, since somebody wants to know.
    reads: RefCell<Vec<u8>>,
}

impl Memory {
    pub fn of(bytes: usize) -> Self {
        Self { bytes: RefCell::new(std::vec![0; bytes]), reads: RefCell::new(Vec::new()) }
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.write(Gpa(at), bytes).unwrap();
    }

    pub fn most_reads(&self) -> u8 {
        self.reads.borrow().iter().copied().max().unwrap_or(0)
    }

    /// Counts from here on.
    pub fn forget_reads(&self) {
        *self.reads.borrow_mut() = std::vec![0; self.bytes.borrow().len()];
    }
}

impl GuestMemory for Memory {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        let at = usize::try_from(at.0).map_err(|_| Outside)?;
        let end = at.checked_add(into.len()).ok_or(Outside)?;
        into.copy_from_slice(self.bytes.borrow().get(at..end).ok_or(Outside)?);
        for count in self.reads.borrow_mut().get_mut(at..end).into_iter().flatten() {
            *count = count.saturating_add(1);
        }
        Ok(())
    }

    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        let at = usize::try_from(at.0).map_err(|_| Outside)?;
        let end = at.checked_add(from.len()).ok_or(Outside)?;
        self.bytes.borrow_mut().get_mut(at..end).ok_or(Outside)?.copy_from_slice(from);
        Ok(())
    }

    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside> {
        let same = self.read_u64(at)? == old;
        if same {
            self.write(at, &new.to_le_bytes())?;
        }
        Ok(same)
    }
}

impl L1 for Memory {
    fn read_linear(&mut self, at: u64, into: &mut [u8]) -> Result<(), Stop> {
        self.read(Gpa(at), into).map_err(|_| Stop::Fault(Exception::pf(at, 0)))
    }

    fn write_linear(&mut self, at: u64, from: &[u8]) -> Result<(), Stop> {
        self.write(Gpa(at), from).map_err(|_| Stop::Fault(Exception::pf(at, 2)))
    }
}

pub fn capabilities() -> Capabilities {
    Capabilities::compute(&EVERYTHING, &Offer::WHOLE)
}

pub const LIMITS: Limits = Limits {
    physical_bits: 40,
    linear_bits: 48,
    efer: 0xd01,
    perf_global_ctrl: 0x7_0000_000f,
    debugctl: 3,
    long_mode: true,
    smm: false,
    x2apic: false,
};

/// A vCPU that may execute VMX instructions: L1 in its kernel.
pub const CPU: Cpu = Cpu {
    cr0: 0x8005_0033,
    cr4: 0x2020,
    long_mode: true,
    is_64_bit: true,
    vm86: false,
    cpl: 0,
    blocked_by_mov_ss: false,
    feature_control: 5,
};

/// L0's part of a composition.
pub const L0: merge::L0 = merge::L0 {
    pin: PinControls::from_bits_retain(0x3f),
    primary: ProcControls::HLT.union(ProcControls::SECONDARY),
    secondary: ProcControls2::EPT.union(ProcControls2::VPID),
    exit: ExitControls::HOST_64,
    entry: EntryControls::LOAD_EFER,
    exceptions: 0,
    page_faults: false,
    cr0_ones: 0x20,
    cr0_mask: 0x6000_0020,
    cr4_ones: 0x2000,
    cr4_mask: 0x2000,
    tsc: Tsc { multiplier: 1 << 48, offset: 77 },
    preemption_timer: None,
    vpid: 9,
    pages: Pages {
        virtual_apic: None,
        apic_access: None,
        posted_interrupts: None,
        msr_bitmap: Some(Hpa(0x1000)),
        exit_tsc: None,
    },
    efer: 0xd01,
    dr7: 0x401,
    debugctl: 0,
    pat: 0x0007_0406_0007_0406,
};

/// What L0 knows of an L2 in 64-bit mode when it exits.
pub const KNOWN: Known = Known {
    activity: 0,
    cr0_mask: L0.cr0_mask,
    cr4_mask: L0.cr4_mask,
    preemption_timer: 0,
    pat: L0.pat,
    efer: 0xd01,
    debugctl: 0,
};

/// A VMCS of the hardware's: what it holds, what was written and in which order, and how much was read.
pub struct Vmcs02 {
    pub values: Vec<u64>,
    pub written: Vec<u32>,
    pub reads: Cell<usize>,
}

impl Vmcs02 {
    pub fn new() -> Self {
        Self { values: std::vec![0; 0x8000], written: Vec::new(), reads: Cell::new(0) }
    }

    pub fn put<W: Width, A>(&mut self, field: Field<W, A>, value: W::Value) {
        self.values[field.encoding() as usize] = value.into();
    }

    pub fn has<W: Width, A>(&self, field: Field<W, A>) -> u64 {
        self.values[field.encoding() as usize]
    }

    /// VMREAD by an encoding.
    pub fn of(&self, encoding: u16) -> u64 {
        self.reads.set(self.reads.get() + 1);
        self.values[usize::from(encoding)]
    }

    pub fn wrote<W: Width, A>(&self, field: Field<W, A>) -> bool {
        self.written.contains(&field.encoding())
    }
}

impl Fields for Vmcs02 {
    fn set<W: Width>(&mut self, field: Field<W, ReadWrite>, value: W::Value) {
        self.written.push(field.encoding());
        self.values[field.encoding() as usize] = value.into();
    }
}

impl Exit for Vmcs02 {
    fn get<W: Width, A>(&self, field: Field<W, A>) -> W::Value {
        self.reads.set(self.reads.get() + 1);
        W::from_raw(self.values[field.encoding() as usize])
    }
}
