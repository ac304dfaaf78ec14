//! A panic is a bug of ours: the message goes to the log and the task ends in BUG().
//!
//! In the loop of SVM the GS base is the guest's and GIF is clear. The host's state is loaded first, for all that
//! follows is the kernel's.

use core::fmt::Write;
use core::panic::PanicInfo;

unsafe extern "C" {
    // Does not return; objtool knows that of an instruction, not of a function.
    fn gnt_panic(text: *const u8, len: usize);
    fn gnt_lost_cpu() -> i32;
}

struct Message {
    bytes: [u8; 240],
    len: usize,
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for (to, from) in self.bytes.iter_mut().skip(self.len).zip(text.bytes()) {
            *to = from;
            self.len = self.len.wrapping_add(1);
        }
        Ok(())
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    // SAFETY: reads two registers and the table of the CPUs' places.
    if let Ok(at) = usize::try_from(unsafe { gnt_lost_cpu() }) {
        svm::rescue_host(&mut cpu::Native, at);
    }
    let mut message = Message { bytes: [0; 240], len: 0 };
    // What does not fit is cut.
    let _ = write!(message, "{info}");
    // SAFETY: the buffer is on this stack frame; UD2 is what BUG() executes, too.
    unsafe {
        gnt_panic(message.bytes.as_ptr(), message.len);
        core::arch::asm!("ud2", options(noreturn, nostack))
    }
}
