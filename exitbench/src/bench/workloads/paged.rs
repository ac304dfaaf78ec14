//! What the paged workloads share: the pages are written once each before the first operation; after each switch the guest writes to
//! as many of them as it was told, evenly spread. What a hypervisor threw away at the switch it has to build again then, and so it is
//! part of the figure.

/// Writes to every mapped page.
macro_rules! populate {
    () => {
        "mov %rbx, %rdx
         mov %r10, %r11
      0: movb $1, (%rdx)
         add $4096, %rdx
         dec %r11
         jnz 0b"
    };
}

/// Writes to the pages of the working set.
macro_rules! touch {
    () => {
        "mov %rbx, %rdx
         mov %r8, %r11
      0: movb $1, (%rdx)
         add %r9, %rdx
         dec %r11
         jnz 0b"
    };
}

pub(super) use {populate, touch};
