//! Virtual interrupts that L1 has delivered to L2, and posted ones: in software, on L1's virtual-APIC page and the
//! interrupt status of the VMCS12 (SDM vol. 3C §30.1.3 to §30.2.2, §30.6).
//!
//! What the CPU would find out at an entry, at a write of L2's and at a notification is found out here at the same
//! moments, and at no other: L1 may change its page when it likes.

use x86::vmcs::{PinControls, ProcControls, ProcControls2, field};
use x86::{Gpa, apic::reg};

use crate::{GuestMemory, Outside, Vmcs12};

/// Whether L1 asks for it.
#[inline]
pub fn are_on(v: &Vmcs12) -> bool {
    v.secondary().contains(ProcControls2::VIRTUAL_INTERRUPTS)
}

/// Whether a virtual interrupt may wait for L2, whatever its page says.
pub fn may_wait(v: &Vmcs12) -> bool {
    // Above priority 0 is what can be said without the page.
    are_on(v) && is_above(v, 0)
}

/// What an end of interrupt came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// L2 goes on; whether a virtual interrupt waits for it.
    On(bool),
    /// L1 sees an exit for the end of this vector.
    Exit(u8),
}

/// Words of 32 bits in which a register of 256 lies, 16 bytes apart.
const WORDS: u64 = 8;
/// Most tries to change what another vCPU of L1's changes too.
const TRIES: u32 = 8;

fn requested(v: &Vmcs12) -> u8 {
    v.get(field::GUEST_INTERRUPT_STATUS) as u8
}

fn in_service(v: &Vmcs12) -> u8 {
    (v.get(field::GUEST_INTERRUPT_STATUS) >> 8) as u8
}

fn set_status(v: &mut Vmcs12, requested: u8, in_service: u8) {
    v.set(field::GUEST_INTERRUPT_STATUS, u16::from_le_bytes([requested, in_service]));
}

fn register(v: &Vmcs12, offset: u32) -> Gpa {
    Gpa(v.get(field::VIRTUAL_APIC_ADDR).wrapping_add(u64::from(offset)))
}

/// The word with the bit of a vector, and the bit.
fn place(v: &Vmcs12, base: u32, vector: u8) -> (Gpa, u32) {
    // Registers of 256 bits lie in eight words, 16 bytes apart.
    (register(v, base + u32::from(vector >> 5) * 16), 1 << (vector & 31))
}

fn change(v: &Vmcs12, base: u32, vector: u8, set: bool, memory: &impl GuestMemory) {
    // Not atomic: others post into the descriptor, and leave the page to this vCPU.
    let (at, bit) = place(v, base, vector);
    if let Ok(word) = memory.read_u32(at) {
        let new = if set { word | bit } else { word & !bit };
        let _ = memory.write(at, &new.to_le_bytes());
    }
}

/// The highest vector in a register; 0: there is none.
fn highest(v: &Vmcs12, base: u32, memory: &impl GuestMemory) -> u8 {
    // Downwards: the highest vector is the most urgent.
    for word in (0..WORDS).rev() {
        let bits = memory.read_u32(register(v, base + word as u32 * 16)).unwrap_or(0);
        // 0 is no vector: the first sixteen are no interrupts.
        if let Some(bit) = bits.checked_ilog2() {
            return (word as u8) << 5 | bit as u8;
        }
    }
    0
}

/// The processor's priority anew (§30.1.3), and whether a virtual interrupt waits for L2 now: at an entry, and when L2 has
/// changed its priority. Without memory none does.
pub fn evaluate(v: &Vmcs12, memory: &impl GuestMemory) -> bool {
    // A byte: the rest of the register is reserved.
    let Ok(own) = memory.read_u8(register(v, reg::TPR)) else { return false };
    let served = in_service(v);
    // The higher class of the two; with equal ones the whole of the task priority (SDM vol. 3A §11.8.3.1).
    let priority = if own >> 4 >= served >> 4 { own } else { served & 0xf0 };
    let at = register(v, reg::PPR);
    // A page that is not written stays clean, and may be read alone.
    if memory.read_u32(at) != Ok(u32::from(priority)) {
        let _ = memory.write(at, &u32::from(priority).to_le_bytes());
    }
    is_above(v, priority)
}

fn is_above(v: &Vmcs12, priority: u8) -> bool {
    // L1's interrupt window keeps virtual interrupts off: the exit for it comes first (§30.2.1).
    !v.primary().contains(ProcControls::INTERRUPT_WINDOW) && requested(v) >> 4 > priority >> 4
}

fn is_pending(v: &Vmcs12, memory: &impl GuestMemory) -> bool {
    // By the PPR as it was evaluated last: the manual evaluates anew at few moments alone.
    memory.read_u8(register(v, reg::PPR)).is_ok_and(|priority| is_above(v, priority))
}

/// L2 ends an interrupt (§30.1.4).
pub fn end(v: &mut Vmcs12, memory: &impl GuestMemory) -> Ended {
    // The vector is what the status has as in service, not what the page says.
    let vector = in_service(v);
    change(v, reg::ISR, vector, false, memory);
    let next = highest(v, reg::ISR, memory);
    // What was pending below it comes up.
    set_status(v, requested(v), next);
    // The priority falls with what was in service: something may be deliverable now.
    let waits = evaluate(v, memory);
    let words = [field::EOI_EXIT_0, field::EOI_EXIT_1, field::EOI_EXIT_2, field::EOI_EXIT_3];
    // 64 vectors in each of the four words.
    let exits = words.into_iter().nth(usize::from(vector >> 6)).map_or(0, |word| v.get(word));
    if exits >> (vector & 63) & 1 != 0 { Ended::Exit(vector) } else { Ended::On(waits) }
}

/// L2 sends itself an interrupt (§30.1.5). Whether one waits.
pub fn send_self(v: &mut Vmcs12, vector: u8, memory: &impl GuestMemory) -> bool {
    change(v, reg::IRR, vector, true, memory);
    // RVI only rises: a request below it waits in the page.
    set_status(v, requested(v).max(vector), in_service(v));
    // Not evaluated anew: a request changes no priority (§30.1.5).
    is_pending(v, memory)
}

/// Whether a write to the low half of the ICR is one that [`send_self`] does (§30.4.3.2); its vector.
pub fn self_ipi(value: u32) -> Option<u8> {
    const RESERVED: u32 = 0xfff3_3000;
    const SHORTHAND: u32 = 3 << 18;
    const SELF: u32 = 1 << 18;
    const LEVEL_TRIGGERED: u32 = 1 << 15;
    const MODE: u32 = 7 << 8;
    // Fixed, edge-triggered, to itself: all else of the ICR goes to L1.
    let vector = value as u8;
    let fits = value & (RESERVED | LEVEL_TRIGGERED | MODE) == 0
        && value & SHORTHAND == SELF
        && vector >> 4 != 0;
    fits.then_some(vector)
}

/// The virtual interrupt that waits goes to L2 (§30.2.2): its vector. `None`: by what the page says now there is none.
///
/// # Errors
/// The page is no memory; nothing has changed.
pub fn deliver(v: &mut Vmcs12, memory: &impl GuestMemory) -> Result<Option<u8>, Outside> {
    // Asked again: L1 may have changed its page since the interrupt was found to wait.
    if !evaluate(v, memory) {
        return memory.read_u8(register(v, reg::TPR)).map(|_| None);
    }
    let vector = requested(v);
    // First what can fail: nothing has changed then.
    let (at, bit) = place(v, reg::ISR, vector);
    let word = memory.read_u32(at)?;
    memory.write(at, &(word | bit).to_le_bytes())?;
    // PPR becomes the class of what is delivered (§30.2.2).
    let _ = memory.write(register(v, reg::PPR), &u32::from(vector & 0xf0).to_le_bytes());
    change(v, reg::IRR, vector, false, memory);
    let next = highest(v, reg::IRR, memory);
    // RVI is the next below, SVI what is delivered now.
    set_status(v, next, vector);
    Ok(Some(vector))
}

/// The notification of posted interrupts has come (§30.6): what L1's descriptor names is requested from now on. `None`: the
/// vector is none of a notification. Else whether one waits.
///
/// # Errors
/// The descriptor, or the page, is no memory.
pub fn post(
    v: &mut Vmcs12,
    vector: u8,
    memory: &impl GuestMemory,
) -> Result<Option<bool>, Outside> {
    // Another vector is an interrupt like any other: L1 sees an exit.
    if !v.pin().contains(PinControls::POSTED_INTERRUPTS)
        || v.get(field::POSTED_INTR_VECTOR) != u16::from(vector)
    {
        return Ok(None);
    }
    /// The notification is outstanding.
    const OUTSTANDING: u64 = 1;
    let descriptor = v.get(field::POSTED_INTR_DESC);
    // The page first: what is taken from the descriptor has to have a place.
    let at = register(v, reg::IRR);
    let first = memory.read_u32(at)?;
    memory.write(at, &first.to_le_bytes())?;
    let control = Gpa(descriptor.wrapping_add(32));
    // ON is cleared before PIR is read: who posts behind that sends another notification (§30.6).
    change_bits(control, 0, OUTSTANDING, memory)?;
    for quarter in 0..4 {
        let at = Gpa(descriptor.wrapping_add(u64::from(quarter) * 8));
        let done = request(v, quarter, at, memory);
        // Left: each further quarter is done all the same, so that little waits.
        if done != Ok(true) {
            // Something is left there. L1 looks for that only if a notification is outstanding, and sends no other meanwhile.
            let _ = change_bits(control, OUTSTANDING, 0, memory);
            done?;
        }
    }
    // Requests change no priority: the PPR of before decides.
    Ok(Some(is_pending(v, memory)))
}

/// What a quarter of the descriptor names is requested, and is taken out of it only then: whatever fails in between, it is
/// in one of the two places. False: L1 rewrites it without end, and it is left.
fn request(
    v: &mut Vmcs12,
    quarter: u8,
    at: Gpa,
    memory: &impl GuestMemory,
) -> Result<bool, Outside> {
    // L1's other vCPUs post at any time: the exchange tells whether nobody did in between.
    for _ in 0..TRIES {
        let bits = memory.read_u64(at)?;
        let Some(highest) = bits.checked_ilog2() else { return Ok(true) };
        // Both halves, whether or not they have a bit: two words of the page are one of the descriptor.
        for (half, word) in [(0, bits as u32), (1, (bits >> 32) as u32)] {
            let to = register(v, reg::IRR + (u32::from(quarter) * 2 + half) * 16);
            let word = memory.read_u32(to)? | word;
            memory.write(to, &word.to_le_bytes())?;
        }
        let top = quarter << 6 | highest as u8;
        // Before the exchange: a request that is in both places comes twice, one that is in none is lost.
        set_status(v, requested(v).max(top), in_service(v));
        if memory.exchange(at, bits, 0)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Sets and clears bits of a word that other vCPUs of L1's set bits in. If L1 rewrites it without end, it is left.
fn change_bits(at: Gpa, set: u64, clear: u64, memory: &impl GuestMemory) -> Result<(), Outside> {
    for _ in 0..TRIES {
        let word = memory.read_u64(at)?;
        let new = word & !clear | set;
        // Nothing to change is done without a write.
        if word == new || memory.exchange(at, word, new)? {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "virtual_interrupts_tests.rs"]
mod tests;
