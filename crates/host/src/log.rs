//! Messages to the kernel log, formatted into 256 bytes of stack and cut there.
//!
//! What a guest or a VMM can cause is said with the `*_ratelimited!` forms.

use core::fmt::{self, Write};

use crate::sys;

/// How loud a message is, in the kernel's levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Level {
    /// An error: KERN_ERR.
    Error = 3,
    /// A warning: KERN_WARNING.
    Warning = 4,
    /// For information: KERN_INFO.
    Info = 6,
}

struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let Some(free) = self.bytes.get_mut(self.len..) else { return Err(fmt::Error) };
        let taken = text.len().min(free.len());
        if let (Some(to), Some(from)) = (free.get_mut(..taken), text.as_bytes().get(..taken)) {
            to.copy_from_slice(from);
        }
        self.len = self.len.saturating_add(taken);
        // Told as an error, so that formatting ends where the buffer does.
        if taken == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

/// Writes one line; the macros call this.
#[cold]
#[inline(never)]
pub fn write(level: Level, ratelimited: bool, message: fmt::Arguments<'_>) {
    // A guest may cause a message at each exit, and the log is the administrator's.
    if ratelimited && sys::gnt_log_ratelimit() == 0 {
        return;
    }
    let mut line = Line { bytes: [0; 256], len: 0 };
    // A message that is too long is cut; nothing else can fail.
    let _ = line.write_fmt(message);
    // SAFETY: len bytes of the buffer are initialised.
    unsafe { sys::gnt_log(level as u32, line.bytes.as_ptr(), line.len) }
}

/// Says something of interest, once in a while.
#[macro_export]
macro_rules! info {
    ($($t:tt)*) => { $crate::log::write($crate::log::Level::Info, false, format_args!($($t)*)) };
}
/// Says that something is not as it should be.
#[macro_export]
macro_rules! warn {
    ($($t:tt)*) => { $crate::log::write($crate::log::Level::Warning, false, format_args!($($t)*)) };
}
/// Says that something failed.
#[macro_export]
macro_rules! err {
    ($($t:tt)*) => { $crate::log::write($crate::log::Level::Error, false, format_args!($($t)*)) };
}
/// [`info!`] for what a guest or a VMM can cause.
#[macro_export]
macro_rules! info_ratelimited {
    ($($t:tt)*) => { $crate::log::write($crate::log::Level::Info, true, format_args!($($t)*)) };
}
/// [`warn!`] for what a guest or a VMM can cause.
#[macro_export]
macro_rules! warn_ratelimited {
    ($($t:tt)*) => { $crate::log::write($crate::log::Level::Warning, true, format_args!($($t)*)) };
}

#[cfg(test)]
mod tests {
    use crate::std_port::test;

    #[test]
    fn a_long_message_is_cut_and_a_short_one_is_whole() {
        crate::warn!("answer {}", 42);
        assert_eq!(test::last_log(), "answer 42");
        crate::info!("{}", "x".repeat(1000));
        assert_eq!(test::last_log().len(), 256);
    }
}
