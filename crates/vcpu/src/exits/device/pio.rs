//! Port I/O: devices in the kernel inside the loop, user space outside it.

use backend::{Backend, Gprs, IoExit, RAX};
use emulate::Cause;
use mmu::Section;
use vm::settings::quirk;

use super::{DeviceAccess, user_io::Completion};
use crate::{
    Vcpu,
    run::outcome::{Next, Outcome},
};

/// Puts `size` bytes of `value` into RAX as IN does: AL and AX keep the rest, EAX clears it.
pub(crate) fn merge(rax: u64, value: u64, size: u8) -> u64 {
    match size {
        1 => (rax & !0xff) | (value & 0xff),
        2 => (rax & !0xffff) | (value & 0xffff),
        // A result of 32 bits clears the upper half (SDM vol. 1 §3.4.1.1).
        _ => value & 0xffff_ffff,
    }
}

pub(crate) fn mask(value: u64, size: u8) -> u64 {
    match size {
        1 => value & 0xff,
        2 => value & 0xffff,
        _ => value & 0xffff_ffff,
    }
}

/// What IN or OUT asks for.
#[inline(always)]
fn port_access(gprs: &Gprs, io: &IoExit) -> DeviceAccess {
    if io.input {
        DeviceAccess::port_in(io.port, io.size)
    } else {
        let data = mask(gprs.0[RAX], io.size).to_le_bytes();
        DeviceAccess::port_out(io.port, io.size, data)
    }
}

/// What IN has read goes to RAX.
#[inline(always)]
fn put_in(gprs: &mut Gprs, size: u8, data: [u8; 8]) {
    gprs.0[RAX] = merge(gprs.0[RAX], u64::from_le_bytes(data), size);
}

/// The port at which an option ROM of QEMU's tells where it lies. VMMs expect RIP to be behind the OUT
/// already, unless they said that they do not (KVM_X86_QUIRK_OUT_7E_INC_RIP).
const PORT_OF_OPTION_ROM: u16 = 0x7e;

impl<B: Backend> Vcpu<B> {
    /// RIP after a port instruction: the CPU gives it, or it is decoded.
    fn io_next(&mut self, s: Section<'_>, io: IoExit) -> Option<u64> {
        // SVM tells the address itself, even without NRIP save (EXITINFO2, APM vol. 2 §15.10.2); VMX tells the length.
        if io.next_rip != 0 { Some(io.next_rip) } else { self.next_rip(s) }
    }

    /// A port access inside the loop.
    #[inline]
    pub(crate) fn answer_io(&mut self, s: Section<'_>, io: IoExit) -> Next {
        // String instructions access memory, which may have to be waited for.
        if io.string || !self.vm.irq().has_port(io.port) {
            return Next::Leave;
        }
        let Some(next) = self.io_next(s, io) else { return Next::Leave };
        // With the host's segments: PIC and PIT stand behind a lock of the VM's, and the PIT arms a
        // timer.
        let (done, then) = self.with_kernel(|v| v.kernel_io(&io));
        if !done {
            // The slow path asks user space.
            return Next::Leave;
        }
        // Not before: what no device in the kernel took is asked of user space, at this RIP.
        self.retire(next);
        then
    }

    /// IN or OUT by a device in the kernel. False when there is none.
    #[inline(always)]
    fn kernel_io(&mut self, io: &IoExit) -> bool {
        let mut access = port_access(&self.gprs, io);
        if !self.kernel_device(&mut access) {
            return false;
        }
        if io.input {
            put_in(&mut self.gprs, io.size, access.data);
        }
        true
    }

    /// Where the guest's ports are user space's, one test has said so.
    #[inline(never)]
    fn kernel_io_outside(&mut self, io: &IoExit) -> bool {
        self.kernel_io(io)
    }

    /// The answer to an IN.
    pub(crate) fn finish_in(&mut self, size: u8, data: [u8; 8], next: u64) {
        put_in(&mut self.gprs, size, data);
        self.retire(next);
    }

    /// A port access outside the loop: the kernel's devices, else user space.
    #[inline(always)]
    pub(crate) fn slow_io(&mut self, io: &IoExit) -> Outcome {
        let cause = Cause::Port { port: io.port, size: io.size, input: io.input };
        if io.string {
            return self.emulate_here(cause);
        }
        // Where the CPU does not tell, the instruction is emulated, which may sleep.
        let told = (io.next_rip != 0).then_some(io.next_rip).or_else(|| self.b.next_rip());
        let next = match told {
            Some(next) => next,
            None => return self.emulate_here(cause),
        };
        // A test of the port before the call: most guests have no device of the kernel's on the way
        // of their I/O.
        if self.vm.irq().has_port(io.port) && self.kernel_io_outside(io) {
            self.retire(next);
            return Ok(());
        }
        let then = if io.input {
            Completion::In { size: io.size, next }
        } else if io.port == PORT_OF_OPTION_ROM && self.vm.settings.has_quirk(quirk::OUT_7E_INC_RIP)
        {
            self.retire(next);
            Completion::Nothing
        } else {
            Completion::Retire { next }
        };
        let access = port_access(&self.gprs, io);
        Err(self.device.ask(&access, then))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_keeps_what_the_operand_size_leaves_alone() {
        assert_eq!(merge(0x1122_3344_5566_7788, 0xffff_ffaa, 1), 0x1122_3344_5566_77aa);
        assert_eq!(merge(0x1122_3344_5566_7788, 0xffff_ffaa, 2), 0x1122_3344_5566_ffaa);
        assert_eq!(merge(0x1122_3344_5566_7788, 0xffff_ffaa, 4), 0xffff_ffaa);
    }
}
