//! Steps through tables that a guest or a VMM can make long. In the kernel a step is nothing. On the
//! standard library it is counted, together with locks and signals, while interrupts are off: tests ask
//! for the longest time in which no interrupt could have come ([`crate::std_port::test::longest_irqs_off`]).

/// One more element was looked at.
#[inline(always)]
pub fn step() {
    #[cfg(not(target_os = "none"))]
    crate::sys::step();
}

/// The elements of a table, each a step.
#[inline(always)]
pub fn each<I: IntoIterator>(table: I) -> impl Iterator<Item = I::Item> {
    table.into_iter().inspect(|_| step())
}

/// [`slice::binary_search_by_key`] with its steps.
#[inline]
pub fn search<T, K: Ord>(table: &[T], wanted: &K, key: impl Fn(&T) -> K) -> Result<usize, usize> {
    table.binary_search_by(|entry| {
        step();
        key(entry).cmp(wanted)
    })
}
