//! Two vCPUs whose guests look through the same tables of their hypervisor's: what one changes the other has to see.

use std::thread;
use std::time::Duration;

use kvm_bindings::{kvm_mp_state, kvm_regs};

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::guest::Guest;
use crate::machine::layout::FREE;
use crate::machine::threads::Target;
use crate::outcome::{Answer, Errno, Outcome, equal, fail};

/// What two vCPUs share whose guests look through the same tables, by words: the round, the one that is answered; what the
/// second one's L2 has read and how often; what the first one's has; how many rounds; the entry that the first changes, its
/// two values, what is read by them; what went wrong with the first, in which round, and with the second.
pub const SHARED: u64 = FREE + 0x6_4000;

/// The first vCPU changes an entry of tables that both look through, and tells the second; each round both read by it what
/// they are to. `programs` are where the two begin, `frames` the pages that the two values lead to.
pub fn shoots_down(
    guest: &Guest,
    programs: [u64; 2],
    entry: (u64, [u64; 2]),
    frames: [u64; 2],
) -> Outcome {
    const ROUNDS: u64 = 40;
    let put = |at: u64, value| guest.memory.write(SHARED + at, value);
    let tags = [0x1111, 0x2222];
    put(40, ROUNDS);
    put(48, entry.0);
    for (index, at) in (0..2).zip([0, 8]) {
        guest.memory.write(frames[index], tags[index]);
        put(56 + at, entry.1[index]);
        put(72 + at, tags[index]);
    }
    for (vcpu, rip) in guest.vcpus.iter().zip(programs) {
        vcpu.set_regs(&kvm_regs { rip, ..vcpu.regs()? })?;
    }
    let runnable = kvm_mp_state::default();
    guest.vcpus[1].send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
    let (told, other) = (&Target::new(), &guest.vcpus[1]);
    let ended = thread::scope(|scope| {
        let thread = scope.spawn(|| {
            told.is_me();
            match other.run() {
                Err(Errno(libc::EINTR)) => Ok(()),
                end => fail(format!("the second vCPU: expected no end got {end:x?}")),
            }
        });
        let ended = guest.finish();
        other.set_immediate_exit(1);
        while !thread.is_finished() {
            told.kick();
            thread::sleep(Duration::from_millis(1));
        }
        ended.and(thread.join().unwrap_or_else(|_| fail("the second vCPU's thread has ended")))
    });
    let word = |at| guest.memory.read(SHARED + at);
    equal("what went wrong, and when", (word(88), word(96), word(104)), (0, 0, 0))?;
    ended?;
    equal("rounds", (word(0), word(8)), (ROUNDS, ROUNDS))
}
