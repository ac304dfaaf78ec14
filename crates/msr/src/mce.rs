//! The machine-check architecture: global registers, banks, and errors that a VMM injects.
//!
//! SDM vol. 3B ch. 15, APM vol. 2 ch. 9, KVM API §4.104 to §4.106. A guest's machine checks are its VMM's;
//! the host's own never reach it.

use crate::{By, NoMemory, Refused};
use alloc::vec::Vec;
use host::GuestIndex;
use x86::msr::*;

/// Banks at most (KVM_MAX_MCE_BANKS).
pub const MAX_BANKS: usize = 32;
/// Control, status, address, misc.
const REGISTERS: usize = 4;
/// MCG_CAP bits that a VMM may set beside the number of banks and the extended-register count
/// (KVM_X86_GET_MCE_CAP_SUPPORTED answers this), and the number of banks.
pub(crate) const SUPPORTED: u64 = mce::CAP_CTL | mce::CAP_SER | MAX_BANKS as u64;
/// [`SUPPORTED`] on Intel's CPUs, which have corrected errors' interrupts and local machine checks besides.
pub(crate) const SUPPORTED_BY_INTEL: u64 = SUPPORTED | mce::CAP_CMCI | mce::CAP_LMCE;

/// A machine check that a VMM injects (KVM_X86_SET_MCE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct McReport {
    /// MCi_STATUS of the bank.
    pub status: u64,
    /// MCi_ADDR of the bank.
    pub address: u64,
    /// MCi_MISC of the bank.
    pub misc: u64,
    /// MCG_STATUS, of all banks.
    pub mcg_status: u64,
    /// The number of the bank.
    pub bank: u8,
}

/// What an injected machine check does beyond the banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum McVerdict {
    /// Logged, or reporting is switched off.
    Logged,
    /// Logged, and the local APIC is to tell of it by its LVT_CMCI.
    Interrupt,
    /// #MC is to be delivered.
    Raise,
    /// A second one while the first is handled, or CR4.MCE is clear: shutdown.
    TripleFault,
}

/// What the guest may write to MCi_STATUS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Statuses {
    /// Nothing but zero.
    Clearable,
    /// Anything: HWCR says so (AMD).
    Writable,
}

#[derive(Clone, Debug)]
pub(crate) struct MachineChecks {
    /// Bits of MCG_CAP that may be set.
    supported: u64,
    cap: u64,
    status: u64,
    ctl: u64,
    ext_ctl: u64,
    /// Four registers per bank, then one CTL2 per bank.
    banks: Vec<[u64; REGISTERS + 1]>,
}

/// The bank and register of an MSR of the four-per-bank range.
const fn bank_of(index: u32) -> (usize, usize) {
    let offset = index.wrapping_sub(MC0_CTL) as usize;
    (offset / REGISTERS, offset % REGISTERS)
}

impl MachineChecks {
    pub(crate) fn new(supported: u64) -> Result<Self, NoMemory> {
        let mut banks = Vec::new();
        // All banks at once: setting them up later must not need memory.
        banks.try_reserve_exact(MAX_BANKS).map_err(|_| NoMemory)?;
        banks.resize(MAX_BANKS, [0; REGISTERS + 1]);
        Ok(Self { supported, cap: MAX_BANKS as u64, status: 0, ctl: 0, ext_ctl: 0, banks })
    }

    pub(crate) fn has_cmci(&self) -> bool {
        self.cap & mce::CAP_CMCI != 0
    }

    pub(crate) fn has_local(&self) -> bool {
        self.cap & mce::CAP_LMCE != 0
    }

    pub(crate) fn ext_ctl(&self) -> u64 {
        self.ext_ctl
    }

    pub(crate) fn set_ext_ctl(&mut self, value: u64) -> Result<(), Refused> {
        if value & !mce::EXT_CTL_LMCE != 0 {
            return Err(Refused);
        }
        self.ext_ctl = value;
        Ok(())
    }

    fn count(&self) -> usize {
        (self.cap & mce::CAP_BANKS) as usize
    }

    /// Sets the banks up as KVM_X86_SETUP_MCE asks (KVM API §4.104).
    pub(crate) fn set_up(&mut self, cap: u64) -> Result<(), Refused> {
        // Counted before the mask: these bits are a number, and no capabilities.
        let count = (cap & mce::CAP_BANKS) as usize;
        if count == 0 || count > MAX_BANKS || cap & !(self.supported | 0xff | 0x00ff_0000) != 0 {
            return Err(Refused);
        }
        self.cap = cap;
        // All errors on, for the register is told to exist from now on.
        if cap & mce::CAP_CTL != 0 {
            self.ctl = u64::MAX;
        }
        for bank in self.banks.iter_mut().take(count) {
            let [ctl, .., ctl2] = bank;
            // All errors are enabled from the start, as in stock KVM.
            *ctl = u64::MAX;
            *ctl2 = 0;
        }
        Ok(())
    }

    pub(crate) fn read(&self, index: u32, by: By) -> Result<u64, Refused> {
        match index {
            // Of the Pentium. Systems that look there find nothing.
            P5_MC_ADDR | P5_MC_TYPE => Ok(0),
            MCG_CAP => Ok(self.cap),
            MCG_STATUS => Ok(self.status),
            // A VMM saves what the list names, whatever MCG_CAP says.
            MCG_CTL if by == By::Vmm || self.cap & mce::CAP_CTL != 0 => Ok(self.ctl),
            MC0_CTL2..MC0_CTL if by == By::Vmm || self.cap & mce::CAP_CMCI != 0 => {
                // The table's range has 32 of them; more do not come here.
                let bank = index.wrapping_sub(MC0_CTL2) as usize;
                self.register(bank, REGISTERS)
            }
            MC0_CTL.. => {
                let (bank, register) = bank_of(index);
                self.register(bank, register)
            }
            _ => Err(Refused),
        }
    }

    fn register(&self, bank: usize, register: usize) -> Result<u64, Refused> {
        // All 32 banks have room; MCG_CAP says how many of them exist.
        if bank >= self.count() {
            return Err(Refused);
        }
        let bank = GuestIndex::from(bank).of(&self.banks).ok_or(Refused)?;
        GuestIndex::from(register).of(bank).copied().ok_or(Refused)
    }

    pub(crate) fn write(
        &mut self,
        index: u32,
        value: u64,
        by: By,
        statuses: Statuses,
    ) -> Result<(), Refused> {
        match index {
            // Any value: the guest's handler clears MCIP, and a VMM restores it.
            MCG_STATUS => self.status = value,
            MCG_CTL => {
                // A VMM may restore 0 into what its vCPU does not have.
                let exists = self.cap & mce::CAP_CTL != 0 || (by == By::Vmm && value == 0);
                if !exists || !matches!(value, 0 | u64::MAX) {
                    return Err(Refused);
                }
                self.ctl = value;
            }
            MC0_CTL2..MC0_CTL => {
                let exists = self.cap & mce::CAP_CMCI != 0 || (by == By::Vmm && value == 0);
                if !exists || value & !(mce::CTL2_CMCI_ENABLE | mce::CTL2_THRESHOLD) != 0 {
                    return Err(Refused);
                }
                let bank = index.wrapping_sub(MC0_CTL2) as usize;
                *self.register_mut(bank, REGISTERS)? = value;
            }
            MC0_CTL.. => {
                let (bank, register) = bank_of(index);
                let allowed = match register {
                    // All or nothing; but old systems clear bit 10 (a GART erratum of K8) or
                    // bit 0, and must be let through.
                    0 => value == 0 || value | 1 << 10 | 1 == u64::MAX,
                    1 => by == By::Vmm || value == 0 || statuses == Statuses::Writable,
                    _ => true,
                };
                // Whether the bank exists goes before what it takes: both are refused alike, but
                // nothing is indexed unchecked.
                let slot = self.register_mut(bank, register)?;
                if !allowed {
                    return Err(Refused);
                }
                *slot = value;
            }
            _ => return Err(Refused),
        }
        Ok(())
    }

    fn register_mut(&mut self, bank: usize, register: usize) -> Result<&mut u64, Refused> {
        if bank >= self.count() {
            return Err(Refused);
        }
        let bank = GuestIndex::from(bank).of_mut(&mut self.banks).ok_or(Refused)?;
        GuestIndex::from(register).of_mut(bank).ok_or(Refused)
    }

    /// Reports a machine check as KVM_X86_SET_MCE asks (KVM API §4.106).
    pub(crate) fn inject(
        &mut self,
        report: &McReport,
        cr4_mce: bool,
    ) -> Result<McVerdict, Refused> {
        let count = self.count();
        let bank = self.banks.iter_mut().take(count).nth(report.bank.into()).ok_or(Refused)?;
        if report.status & mce::BANK_VALID == 0 {
            return Err(Refused);
        }
        let [ctl, status, address, misc, ctl2] = bank;
        if report.mcg_status == 0
            && report.status & mce::BANK_UC != 0
            && report.status & mce::BANK_PCC_S_AR == 0
        {
            // Nobody has to act on it, so no #MC: it is logged over what was there, and told of as
            // corrected errors are, where the guest asked for that.
            (*status, *address, *misc) = (report.status, report.address, report.misc);
            self.status = 0;
            let told = self.cap & mce::CAP_CMCI != 0 && *ctl2 & mce::CTL2_CMCI_ENABLE != 0;
            return Ok(if told { McVerdict::Interrupt } else { McVerdict::Logged });
        }
        let occupied = *status & mce::BANK_VALID != 0;
        // Said where something is overwritten that nobody has read (SDM vol. 3B §15.3.2.2).
        let overflow = if occupied { mce::BANK_OVERFLOW } else { 0 };
        let mut log = |status: &mut u64| {
            *address = report.address;
            *misc = report.misc;
            *status = report.status | overflow;
        };
        if report.status & mce::BANK_UC == 0 {
            // A corrected error never overwrites an uncorrected one.
            if occupied && *status & mce::BANK_UC != 0 {
                *status |= mce::BANK_OVERFLOW;
            } else {
                log(status);
            }
            return Ok(McVerdict::Logged);
        }
        // Stock KVM does not log it then either.
        let disabled = self.cap & mce::CAP_CTL != 0 && self.ctl != u64::MAX;
        if disabled || *ctl != u64::MAX {
            return Ok(McVerdict::Logged);
        }
        // A machine check during another, or with CR4.MCE clear, shuts a CPU down (SDM vol. 3B
        // §15.3.1.2, vol. 3A §2.5).
        if self.status & mce::STATUS_MCIP != 0 || !cr4_mce {
            return Ok(McVerdict::TripleFault);
        }
        // Behind the checks: what shuts the processor down is not logged, as on stock KVM.
        log(status);
        self.status = report.mcg_status;
        Ok(McVerdict::Raise)
    }
}
