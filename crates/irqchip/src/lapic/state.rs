//! Saving and restoring: the register page of KVM_GET_LAPIC and KVM_SET_LAPIC (KVM API §4.57).
//!
//! 1024 bytes, each register in the first four of sixteen bytes at its xAPIC offset. In x2APIC
//! mode the id stands in bits 31:24, as in xAPIC mode, unless user space enabled 32-bit ids.

use x86::apic::{lvt, reg, svr};

use super::regs::{LVT_COUNT, LVT_WRITABLE};
use super::{FEATURE_CMCI, Lapic, LapicMode, LocalVector, TimerOp};
use crate::atomic::Ordering::*;

/// Bytes in a saved register page.
pub const REGISTER_PAGE: usize = 1024;

/// The page cannot be restored: its id is not this vCPU's (EINVAL).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreError;

fn get(page: &[u8; REGISTER_PAGE], offset: u32) -> u32 {
    let start = offset as usize;
    match page.get(start..start + 4).and_then(|b| <[u8; 4]>::try_from(b).ok()) {
        Some(bytes) => u32::from_le_bytes(bytes),
        None => 0,
    }
}

fn put(page: &mut [u8; REGISTER_PAGE], offset: u32, value: u32) {
    let start = offset as usize;
    if let Some(bytes) = page.get_mut(start..start + 4) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

// Saved as they read, and restored one by one below: some only read, some follow from others.
const PLAIN: [u32; 21] = [
    reg::VERSION,
    reg::TPR,
    reg::PPR,
    reg::LDR,
    reg::DFR,
    reg::SVR,
    reg::ESR,
    reg::ICR,
    reg::ICR2,
    reg::LVT_TIMER,
    reg::LVT_THERMAL,
    reg::LVT_PMC,
    reg::LVT_LINT0,
    reg::LVT_LINT1,
    reg::LVT_ERROR,
    reg::TIMER_INITIAL,
    reg::TIMER_CURRENT,
    reg::TIMER_DIVIDE,
    reg::APR,
    reg::EOI,
    reg::RRD,
];

/// In the order of [`LocalVector`].
const LVT_OFFSETS: [u32; LVT_COUNT] = [
    reg::LVT_TIMER,
    reg::LVT_THERMAL,
    reg::LVT_PMC,
    reg::LVT_LINT0,
    reg::LVT_LINT1,
    reg::LVT_ERROR,
    reg::LVT_CMCI,
];

impl Lapic {
    /// Writes the register page. `wide_ids`: user space enabled 32-bit ids
    /// (KVM_X2APIC_API_USE_32BIT_IDS).
    pub fn save(&self, page: &mut [u8; REGISTER_PAGE], wide_ids: bool, now_ns: u64) {
        // The page goes to user space whole: what lies between the registers must not be the
        // kernel's.
        page.fill(0);
        let id =
            if self.mode() == LapicMode::X2Apic && wide_ids { self.id() } else { self.id() << 24 };
        put(page, reg::ID, id);
        // By the guest's own reads: a register has one way to be shown.
        for offset in PLAIN {
            put(page, offset, self.read(offset, || now_ns));
        }
        if self.has(FEATURE_CMCI) {
            put(page, reg::LVT_CMCI, self.lvt(LocalVector::Cmci));
        }
        for index in 0..8 {
            put(page, reg::ISR + index * 16, self.isr.register(index));
            put(page, reg::TMR + index * 16, self.tmr.register(index));
            put(page, reg::IRR + index * 16, self.irr.register(index));
        }
        if self.timer_due(now_ns) && !self.tsc_deadline_mode() {
            // Expired, but the host timer has not fired: one count is left, so that it is not lost.
            put(page, reg::TIMER_CURRENT, 1);
        }
    }

    /// Takes over a register page. The mode is that of the base MSR, which is restored before.
    ///
    /// The TSC deadline is no register of this page: one that runs goes on if the timer's mode stays, and
    /// otherwise its MSR is to be restored after it.
    ///
    /// # Errors
    /// [`RestoreError`] when in x2APIC mode a 32-bit id is not this vCPU's; nothing is changed then.
    pub fn restore(
        &self,
        page: &[u8; REGISTER_PAGE],
        wide_ids: bool,
        now_ns: u64,
    ) -> Result<TimerOp, RestoreError> {
        let saved_id = get(page, reg::ID);
        if self.mode() == LapicMode::X2Apic {
            // Eight bits cannot say which vCPU it is, so only the wide form is held to it.
            if wide_ids && saved_id != self.vcpu_id {
                return Err(RestoreError);
            }
        } else {
            self.set_address(self.mode(), saved_id >> 24);
            self.ldr.store(get(page, reg::LDR) & 0xff00_0000, Relaxed);
            self.dfr.store(get(page, reg::DFR) | 0x0fff_ffff, Relaxed);
        }
        // By the entry of before, which the page replaces.
        let deadline = self.tsc_deadline();
        // Before the LVT: a disabled APIC would mask what is written.
        let svr = get(page, reg::SVR);
        self.svr.store(svr & 0x3ff | svr & svr::DIRECTED_EOI, Relaxed);
        self.software_enabled.store(u8::from(svr & 0x100 != 0), Relaxed);
        for ((offset, writable), lvt) in LVT_OFFSETS.into_iter().zip(LVT_WRITABLE).zip(&self.lvt) {
            // The entry is masked without the feature, whatever the VMM's page says.
            if offset == reg::LVT_CMCI && !self.has(FEATURE_CMCI) {
                continue;
            }
            let mut value = get(page, offset) & writable;
            if svr & 0x100 == 0 {
                // As a write would: a disabled APIC must not be restored with an entry that
                // interrupts.
                value |= lvt::MASKED;
            }
            lvt.store(value, Relaxed);
        }
        self.icr_lo.store(get(page, reg::ICR), Relaxed);
        self.icr_hi.store(get(page, reg::ICR2), Relaxed);
        self.esr.store(get(page, reg::ESR) & 0xff, Relaxed);
        // Errors that the guest has not asked for yet are no part of the page.
        self.esr_pending.store(0, Relaxed);
        for index in 0..8 {
            self.isr.set_register(index, get(page, reg::ISR + index * 16));
            self.tmr.set_register(index, get(page, reg::TMR + index * 16));
            self.irr.set_register(index, get(page, reg::IRR + index * 16));
        }
        // Nothing that follows from the registers is in the page: it is derived here.
        self.isr_highest.store(self.isr.highest(), Relaxed);
        // The registers came one by one, and the hint with none of them.
        self.refresh_pending();
        // Last: the processor priority follows from what is in service.
        self.set_tpr(get(page, reg::TPR) as u8);
        let (initial, divide) = (get(page, reg::TIMER_INITIAL), get(page, reg::TIMER_DIVIDE));
        if deadline != 0 && self.tsc_deadline_mode() {
            return Ok(self.timer_keep(initial, divide));
        }
        Ok(self.timer_restore(initial, get(page, reg::TIMER_CURRENT), divide, now_ns))
    }
}
