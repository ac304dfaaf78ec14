//! Every command with good and bad input, against objects that only remember what they were asked.
//! User memory is memory of this process; NULL and holes fault.

mod faults;
mod mock;
mod random;
mod system;
mod vcpu;
mod vm;

use gannet_kvm_abi::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// User memory with a head and an array behind it.
struct Buffer(Vec<u64>);

impl Buffer {
    fn new<T: IntoBytes + Immutable>(head: &T) -> Self {
        Self::with(head, &[0u8; 0])
    }
    fn with<T: IntoBytes + Immutable, E: IntoBytes + Immutable>(head: &T, rest: &[E]) -> Self {
        let mut bytes = head.as_bytes().to_vec();
        bytes.extend_from_slice(rest.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8) + 64, 0xcc);
        Self(bytes.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect())
    }
    fn zeroed(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(8)])
    }
    fn addr(&mut self) -> u64 {
        self.0.as_mut_ptr() as u64
    }
    fn get<T: FromBytes>(&self) -> T {
        self.at(0)
    }
    fn at<T: FromBytes>(&self, offset: usize) -> T {
        T::read_from_prefix(&self.0.as_bytes()[offset..]).unwrap().0
    }
}

/// A value that must be refused.
#[track_caller]
fn refused(reply: Result<i32, Errno>, errno: Errno) {
    assert_eq!(reply, Err(errno));
}
