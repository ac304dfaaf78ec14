//! A guest as a VMM saves and restores it: the state of its vCPU, part by part, and its memory.

use kvm_bindings::*;

use super::guest::Guest;
use super::memory::Memory;
use crate::kvm::file::{Commands, CpuidTable, System};
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Errno, Outcome, fail, holds};

/// Bytes of the header of a nested state.
pub const HEADER: usize = 128;
/// Bytes of the largest nested state.
pub const LARGEST: usize = HEADER + 2 * 4096;
/// More MSRs than any module lists.
const MSRS: usize = 512;
const FEATURE_CONTROL: u32 = 0x3a;
const EFER: u32 = 0xc000_0080;

/// Bytes that begin at a multiple of 8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nested(pub Vec<u64>);

impl Nested {
    /// A buffer for so many bytes, which says so.
    pub fn with_room(bytes: usize) -> Self {
        let mut new = Self(vec![0; LARGEST / 8]);
        new.put(4, &(bytes as u32).to_le_bytes());
        new
    }

    /// Its bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Writes bytes into it.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        for (byte, at) in bytes.iter().zip(at..) {
            let shift = at % 8 * 8;
            self.0[at / 8] = self.0[at / 8] & !(0xff << shift) | u64::from(*byte) << shift;
        }
    }

    /// The flags.
    pub fn flags(&self) -> u16 {
        self.0[0] as u16
    }

    /// The size that it tells.
    pub fn size(&self) -> u32 {
        (self.0[0] >> 32) as u32
    }

    /// With another value somewhere.
    pub fn with(&self, at: usize, bytes: &[u8]) -> Self {
        let mut new = self.clone();
        new.put(at, bytes);
        new
    }
}

/// KVM_GET_NESTED_STATE.
pub fn nested(vcpu: &Vcpu) -> Outcome<Nested> {
    let mut state = Nested::with_room(LARGEST);
    vcpu.call(ioctl::GET_NESTED_STATE, state.0.as_mut_ptr() as u64)
        .granted("KVM_GET_NESTED_STATE")?;
    Ok(state)
}

/// KVM_SET_NESTED_STATE.
pub fn set_nested(vcpu: &Vcpu, state: &Nested) -> Result<i32, Errno> {
    vcpu.call(ioctl::SET_NESTED_STATE, state.0.as_ptr() as u64)
}

/// Lets the vCPU finish what user space answered last.
pub fn finish_access(vcpu: &Vcpu) -> Outcome {
    vcpu.set_immediate_exit(1);
    let stopped = vcpu.run();
    vcpu.set_immediate_exit(0);
    holds("EINTR", matches!(stopped, Err(Errno(libc::EINTR))), stopped)
}

fn bytes_of<T>(value: &T) -> Vec<u8> {
    // SAFETY: what KVM gives or takes is plain bytes, all of which are initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
        .to_vec()
}

/// A part that one command gives and another takes.
type Part = (&'static str, u64, u64, usize);

/// Restored in this order.
const PARTS: [Part; 9] = [
    ("SREGS", ioctl::GET_SREGS, ioctl::SET_SREGS, size_of::<kvm_sregs>()),
    ("NESTED_STATE", ioctl::GET_NESTED_STATE, ioctl::SET_NESTED_STATE, LARGEST),
    ("REGS", ioctl::GET_REGS, ioctl::SET_REGS, size_of::<kvm_regs>()),
    ("XSAVE", ioctl::GET_XSAVE, ioctl::SET_XSAVE, size_of::<kvm_xsave>()),
    ("XCRS", ioctl::GET_XCRS, ioctl::SET_XCRS, size_of::<kvm_xcrs>()),
    ("LAPIC", ioctl::GET_LAPIC, ioctl::SET_LAPIC, size_of::<kvm_lapic_state>()),
    ("DEBUGREGS", ioctl::GET_DEBUGREGS, ioctl::SET_DEBUGREGS, size_of::<kvm_debugregs>()),
    ("VCPU_EVENTS", ioctl::GET_VCPU_EVENTS, ioctl::SET_VCPU_EVENTS, size_of::<kvm_vcpu_events>()),
    ("MP_STATE", ioctl::GET_MP_STATE, ioctl::SET_MP_STATE, size_of::<kvm_mp_state>()),
];

/// A guest of one vCPU that was saved.
pub struct Saved {
    cpuid: Box<CpuidTable>,
    msrs: Vec<(u32, u64)>,
    parts: Vec<Vec<u64>>,
    memory: Vec<u8>,
    /// It uses an enlightened VMCS, which a VMM has to switch on.
    enlightened: bool,
}

fn words(bytes: usize) -> usize {
    bytes.div_ceil(8)
}

fn indices(system: &System, command: u64) -> Outcome<Vec<u32>> {
    let mut list = vec![0u32; MSRS + 1];
    list[0] = MSRS as u32;
    system.call(command, list.as_mut_ptr() as u64).granted("a list of MSRs")?;
    let count = list[0] as usize;
    Ok(list[1..=count].to_vec())
}

/// The MSRs that a VMM saves: those that KVM lists, and what VMX is for the guest.
fn read_msrs(guest: &Guest) -> Outcome<Vec<(u32, u64)>> {
    let mut all = indices(&guest.system, ioctl::GET_MSR_INDEX_LIST)?;
    all.extend(0x480..=0x491);
    let mut values = Vec::new();
    for index in all {
        if let Some(value) = guest.vcpu().msr(index)? {
            values.push((index, value));
        }
    }
    Ok(values)
}

impl Saved {
    /// Saves the guest. Its last exit was of an access that it goes on behind.
    pub fn of(guest: &Guest) -> Outcome<Self> {
        finish_access(guest.vcpu())?;
        Self::as_it_is(guest)
    }

    /// Saves a guest that waits for nothing.
    pub fn as_it_is(guest: &Guest) -> Outcome<Self> {
        let vcpu = guest.vcpu();
        let mut cpuid = CpuidTable::empty();
        vcpu.exchange(ioctl::GET_CPUID2, &mut *cpuid).granted("KVM_GET_CPUID2")?;
        let mut parts = Vec::new();
        for (name, get, _, bytes) in PARTS {
            let mut part = vec![0u64; words(bytes)];
            if bytes == LARGEST {
                part = Nested::with_room(LARGEST).0;
            }
            vcpu.call(get, part.as_mut_ptr() as u64).granted(name)?;
            parts.push(part);
        }
        let memory = guest.memory.read_bytes(0, guest.memory.bytes() as usize);
        Ok(Self { cpuid, msrs: read_msrs(guest)?, parts, memory, enlightened: false })
    }

    /// The same for a guest that uses an enlightened VMCS.
    pub fn enlightened(self) -> Self {
        Self { enlightened: true, ..self }
    }

    /// The nested state in it.
    pub fn nested(&self) -> Nested {
        Nested(self.parts[1].clone())
    }

    /// Puts another nested state into it.
    pub fn set_nested(&mut self, state: &Nested) {
        self.parts[1] = state.0.clone();
    }

    fn give(&self, vcpu: &Vcpu, number: usize) -> Outcome {
        let (name, _, set, _) = PARTS[number];
        vcpu.call(set, self.parts[number].as_ptr() as u64).granted(name).map(drop)
    }

    fn give_msrs(&self, vcpu: &Vcpu, only: impl Fn(u32) -> bool) -> Outcome {
        for &(index, value) in self.msrs.iter().filter(|(index, _)| only(*index)) {
            let taken = vcpu.set_msr(index, value)?;
            // Another module may know others, but not of these.
            let needed = index == FEATURE_CONTROL || index == EFER || index >> 4 == 0x0c00_0008;
            if needed && !taken {
                return fail(format!("MSR {index:#x} is not taken back"));
            }
        }
        Ok(())
    }

    /// A new VM with the guest, restored as QEMU does; `memory_last`: the vCPU before the memory.
    pub fn restored(&self, memory_last: bool) -> Outcome<Guest> {
        let order: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 8];
        self.restored_in(order, memory_last)
    }

    /// The same with the parts in another order: system registers, nested state, registers and so on.
    pub fn restored_in(&self, order: &[usize], memory_last: bool) -> Outcome<Guest> {
        let system = System::open()?;
        let vm = system.create_vm()?;
        vm.call(ioctl::SET_TSS_ADDR, 0xfffb_d000).granted("KVM_SET_TSS_ADDR")?;
        vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
        let memory = Memory::new(self.memory.len() as u64)?;
        let slot = || vm.set_slot(0, 0, 0, memory.bytes(), memory.hva()).granted("memory slot");
        if !memory_last {
            memory.write_bytes(0, &self.memory);
            slot()?;
        }
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid(&self.cpuid)?;
        if self.enlightened {
            vcpu.enable_enlightened_vmcs().granted("KVM_ENABLE_CAP")?;
        }
        // What VMX is for the guest, and that it may be switched on, comes before all.
        let early = |index: u32| index == FEATURE_CONTROL || (0x480..=0x491).contains(&index);
        if oracle::vendor() == Vendor::Intel {
            self.give_msrs(&vcpu, early)?;
        }
        for &number in order {
            self.give(&vcpu, number)?;
            if number == 4 {
                self.give_msrs(&vcpu, |index| !early(index))?;
            }
        }
        if memory_last {
            memory.write_bytes(0, &self.memory);
            slot()?;
        }
        Ok(Guest { vcpus: vec![vcpu], vm, memory, system })
    }

    /// All of it as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let msrs = self.msrs.iter().flat_map(|(index, value)| {
            let words = [u64::from(*index), *value];
            words.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>()
        });
        let mut pieces = vec![bytes_of(&*self.cpuid), msrs.collect(), self.memory.clone()];
        pieces.extend(self.parts.iter().map(|part| Nested(part.clone()).bytes()));
        let mut all = Vec::new();
        for piece in pieces {
            all.extend((piece.len() as u64).to_le_bytes());
            all.extend(piece);
        }
        all
    }

    /// From what [`Self::to_bytes`] made.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let mut pieces = Vec::new();
        while let Some((length, rest)) = bytes.split_first_chunk::<8>() {
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            pieces.push(rest.get(..length)?.to_vec());
            bytes = &rest[length..];
        }
        let [table, msrs, memory, parts @ ..] = &pieces[..] else { return None };
        let mut cpuid = CpuidTable::empty();
        if table.len() != size_of::<CpuidTable>() || parts.len() != PARTS.len() {
            return None;
        }
        // SAFETY: as many bytes as the table has, all of which may be anything.
        unsafe {
            let to = std::ptr::from_mut(&mut *cpuid).cast::<u8>();
            std::ptr::copy_nonoverlapping(table.as_ptr(), to, table.len());
        }
        let words = |bytes: &[u8]| -> Vec<u64> {
            bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
        };
        let msrs = words(msrs).as_chunks::<2>().0.iter().map(|[i, v]| (*i as u32, *v)).collect();
        let parts = parts.iter().map(|part| words(part)).collect();
        Some(Self { cpuid, msrs, parts, memory: memory.clone(), enlightened: false })
    }
}
