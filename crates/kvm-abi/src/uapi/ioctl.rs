//! Command numbers. Direction, size of the argument, type (0xAE) and number are packed as in
//! `<asm-generic/ioctl.h>`; the same number stands for different commands on different kinds of
//! files.

use super::{
    clock::*, cpuid::*, debug::*, device::*, event::*, irqchip::*, memory::*, msr::*, registers::*,
    vcpu_state::*,
};

/// The type byte of every KVM command.
pub const KVMIO: u32 = 0xAE;

// From the point of view of user space: "write" is what the kernel reads.
const WRITE: u32 = 1;
const READ: u32 = 2;

/// Packs a command number. The size field has 14 bits; a larger type does not compile when used in
/// a constant.
const fn command(direction: u32, number: u32, size: usize) -> u32 {
    // Fourteen bits of size (asm-generic/ioctl.h): a larger structure would spill into the
    // direction.
    assert!(size < 1 << 14);
    direction << 30 | (size as u32) << 16 | KVMIO << 8 | number
}

const fn io(number: u32) -> u32 {
    command(0, number, 0)
}

const fn ior<T>(number: u32) -> u32 {
    command(READ, number, size_of::<T>())
}

const fn iow<T>(number: u32) -> u32 {
    command(WRITE, number, size_of::<T>())
}

const fn iowr<T>(number: u32) -> u32 {
    command(READ | WRITE, number, size_of::<T>())
}

/// The type byte of any command.
pub const fn type_of(cmd: u32) -> u32 {
    cmd >> 8 & 0xff
}

/// The number of a row, where the row gives it.
macro_rules! number {
    ($name:ident) => {};
    ($name:ident io $number:literal) => {
        pub const $name: u32 = io($number);
    };
    ($name:ident $direction:ident $argument:ident $number:literal) => {
        pub const $name: u32 = $direction::<$argument>($number);
    };
}

macro_rules! numbers {
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
        $(number!($s $($s_number)*);)*
        $(number!($v $($v_number)*);)*
        $(number!($m $($m_number)*);)*
        number!($r $($r_number)*);
        $(number!($c $($c_number)*);)*
        $(number!($u $($u_number)*);)*
    };
}

commands!(numbers);
