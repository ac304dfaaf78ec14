//! The rows of the two tables as values, for `docs/abi.md` and the tests that go through all of them. Nothing of
//! them is in the module.

use crate::uapi::capability::*;
use crate::uapi::ioctl::*;

/// The kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum File {
    /// The file /dev/kvm itself.
    System,
    /// A file of a VM.
    Vm,
    /// A VM, from a 32-bit process, before what [`File::Vm`] says.
    VmCompat,
    /// A file of a vCPU.
    Vcpu,
    /// No file serves it.
    Nobody,
}

/// A command: one ioctl on one kind of file.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// The file that serves it.
    pub file: File,
    /// The command's name without the prefix KVM_.
    pub name: &'static str,
    /// The command's number, with direction and size.
    pub number: u32,
    /// Capabilities that tell of it.
    pub capabilities: &'static [(&'static str, u32)],
    /// The note that `docs/abi.md` gives.
    pub note: &'static str,
}

/// A capability, as KVM_CHECK_EXTENSION is asked for it.
#[derive(Clone, Copy, Debug)]
pub struct Capability {
    /// The capability's name without the prefix KVM_CAP_.
    pub name: &'static str,
    /// The capability's number.
    pub number: u32,
    /// The answer, as it is written.
    pub answer: &'static str,
    /// The note that `docs/abi.md` gives.
    pub note: &'static str,
}

// The tables are handed to these macros a second time: a row cannot be in the dispatch and not in
// the document.
macro_rules! row {
    ($file:ident $name:ident [$($cap:ident),*] $note:literal) => {
        Command {
            file: File::$file,
            name: stringify!($name),
            number: $name,
            capabilities: &[$((stringify!($cap), $cap)),*],
            note: $note,
        }
    };
}

macro_rules! rows {
    (
        (system: $kvm:ident, $s_arg:ident)
        $($s:ident [$($s_number:tt)*] [$($s_cap:ident),*] => $s_do:expr, $s_note:literal;)*
        (vm: $vm:ident, $v_arg:ident)
        $($v:ident [$($v_number:tt)*] [$($v_cap:ident),*] => $v_do:expr, $v_note:literal;)*
        (vm_compat: $compat:ident, $m_arg:ident)
        $($m:ident [$($m_number:tt)*] [$($m_cap:ident),*] => $m_do:expr, $m_note:literal;)*
        (run: $run:ident, $page:ident, $io_page:ident, $r_arg:ident)
        $r:ident [$($r_number:tt)*] [$($r_cap:ident),*] => $r_do:expr, $r_note:literal;
        (vcpu: $vcpu:ident, $c_arg:ident)
        $($c:ident [$($c_number:tt)*] [$($c_cap:ident),*] => $c_do:expr, $c_note:literal;)*
        (unknown)
        $($u:ident [$($u_number:tt)*] $u_note:literal;)*
    ) => {
        /// All commands, file by file.
        pub const COMMANDS: &[Command] = &[
            $(row!(System $s [$($s_cap),*] $s_note),)*
            $(row!(Vm $v [$($v_cap),*] $v_note),)*
            $(row!(VmCompat $m [$($m_cap),*] $m_note),)*
            row!(Vcpu $r [$($r_cap),*] $r_note),
            $(row!(Vcpu $c [$($c_cap),*] $c_note),)*
            $(row!(Nobody $u [] $u_note),)*
        ];
    };
}

commands!(rows);

macro_rules! capability_rows {
    (($offer:ident) $($cap:ident $number:literal => $answer:expr, $note:literal;)*) => {
        /// All capabilities that are known.
        pub const CAPABILITIES: &[Capability] = &[$(Capability {
            name: stringify!($cap),
            number: $number,
            answer: stringify!($answer),
            note: $note,
        },)*];
    };
}

capabilities!(capability_rows);
