//! Holding a thread on one CPU of the host, so that what is measured does not move between caches and clocks.

use anyhow::{Result, bail};

/// Holds the calling thread on CPU `cpu`.
pub fn pin(cpu: usize) -> Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        bail!("there is no CPU {cpu}");
    }
    // SAFETY: a set of CPUs is a bit map, of which all zeros is the empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` is within the map, as asked above.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the call reads the map, whose size is told; 0 is the calling thread.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINVAL) => bail!("CPU {cpu} is not online, or not for this process"),
            _ => bail!("cannot hold a thread on CPU {cpu}: {error}"),
        }
    }
    Ok(())
}

/// Whether a thread can be held on each of these CPUs.
pub fn check(cpus: &[usize]) -> Result<()> {
    if let Some(twice) = (1..cpus.len()).find(|at| cpus[..*at].contains(&cpus[*at])) {
        bail!("CPU {} is named twice", cpus[twice]);
    }
    let all = cpus.to_vec();
    // In a thread of its own, which keeps the caller where it is.
    match std::thread::spawn(move || all.into_iter().try_for_each(pin)).join() {
        Ok(result) => result,
        Err(_) => bail!("the thread that tries the CPUs died"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The CPUs that this process may use.
    fn allowed() -> Vec<usize> {
        (0..libc::CPU_SETSIZE as usize).filter(|cpu| check(&[*cpu]).is_ok()).collect()
    }

    #[test]
    fn a_pinned_thread_runs_where_it_is_held() {
        for cpu in allowed() {
            let at = std::thread::spawn(move || {
                pin(cpu).unwrap();
                // SAFETY: the call takes no argument.
                unsafe { libc::sched_getcpu() }
            });
            assert_eq!(at.join().unwrap() as usize, cpu);
        }
    }

    #[test]
    fn a_cpu_that_is_not_there_is_named() {
        assert!(check(&[usize::MAX]).unwrap_err().to_string().contains("no CPU"));
        assert!(check(&[0, 1, 0]).unwrap_err().to_string().contains("CPU 0 is named twice"));
        assert!(check(&[1023]).unwrap_err().to_string().contains("CPU 1023"));
    }
}
