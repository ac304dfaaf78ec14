//! A guest to test with: memory, registers, and a VMCS12 that every check lets pass.

use core::cell::RefCell;
use std::vec::Vec;

use x86::vmcs::ReadWrite;
use x86::vmcs::field::{Field, Width};
use x86::{Exception, Gpa};

use crate::capabilities::Offer;
use crate::checks::Limits;
pub use crate::example::{EVERYTHING, good};
use crate::leave::{Exit, Known};
use crate::machine::{Cpu, L1, Stop};
use crate::merge::Fields;
pub use crate::set;
use crate::{Capabilities, GuestMemory, Outside};

/// Bytes of memory, from address 0.
pub const SIZE: usize = 0x10_0000;

/// What L0 knows of an L2 in 64-bit mode when it exits.
pub const KNOWN: Known = Known {
    activity: 0,
    cr0_mask: 0x20,
    cr4_mask: 0x2000,
    preemption_timer: 0,
    pat: 0x0007_0406_0007_0406,
    efer: 0xd01,
    debugctl: 0,
};

/// Memory that counts how often each byte is read.
pub struct Memory {
    pub bytes: RefCell<Vec<u8>>,
    pub reads: RefCell<Vec<u8>>,
}

impl Memory {
    pub fn new() -> Self {
        let bytes = RefCell::new(std::vec![0; SIZE]);
        Self { bytes, reads: RefCell::new(std::vec![0; SIZE]) }
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.write(Gpa(at), bytes).unwrap();
    }

    pub fn most_reads(&self) -> u8 {
        self.reads.borrow().iter().copied().max().unwrap_or(0)
    }

    pub fn forget_reads(&self) {
        self.reads.borrow_mut().fill(0);
    }
}

impl GuestMemory for Memory {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        let at = usize::try_from(at.0).map_err(|_| Outside)?;
        let end = at.checked_add(into.len()).ok_or(Outside)?;
        into.copy_from_slice(self.bytes.borrow().get(at..end).ok_or(Outside)?);
        for count in &mut self.reads.borrow_mut()[at..end] {
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

/// A vCPU that may execute VMX instructions.
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

/// A VMCS of the hardware's: what was written, and in which order.
pub struct Vmcs02 {
    pub values: Vec<u64>,
    pub written: Vec<u32>,
    pub read: RefCell<Vec<u32>>,
}

impl Vmcs02 {
    pub fn new() -> Self {
        let read = RefCell::new(Vec::new());
        Self { values: std::vec![0; 0x8000], written: Vec::new(), read }
    }

    pub fn put<W: Width, A>(&mut self, field: Field<W, A>, value: W::Value) {
        self.values[field.encoding() as usize] = value.into();
    }

    pub fn has<W: Width, A>(&self, field: Field<W, A>) -> u64 {
        self.values[field.encoding() as usize]
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
        self.read.borrow_mut().push(field.encoding());
        W::from_raw(self.values[field.encoding() as usize])
    }
}
