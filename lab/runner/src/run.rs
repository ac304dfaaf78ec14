//! Runs a machine: starts the emulator, follows its console, brings back what the job left. The recipes and the reasons for their
//! settings stand in `docs/lab.md`; that of `intel` is in [`bochs`].

use crate::layout::Kernel;
use crate::patience::{Clock, GivenUp, Watch};
use crate::{Emulator, Job, Layout, bochs};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// What `host-init.sh` writes into the host's log where the machine's own boot ends.
const STARTED: &str = "gannet-lab: the job starts";

/// Executed instructions by kind between one pair of markers; `instructions` is all of them.
pub type Counts = BTreeMap<String, u64>;

/// What the machine's console shows while it runs.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A finished line.
    Line(&'a str),
    /// What stands so far on the line that is being written.
    Pending(&'a str),
}

/// What a run left.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// All that the machine wrote on its first serial port.
    pub console: String,
    /// Whether the module was loaded; `None` when the machine ended before.
    pub loaded: Option<bool>,
    /// The command's exit status; `None` when the machine ended before the command did.
    pub status: Option<i32>,
    /// The host kernel's log.
    pub dmesg: String,
    /// What the command left in `/out`.
    pub files: BTreeMap<String, Vec<u8>>,
    /// One record per pair of markers, in the order of execution, when the job has a plugin.
    pub counts: Vec<Counts>,
    /// Wall time.
    pub took: Duration,
}

impl Outcome {
    /// Whether the command ran and ended with 0.
    pub fn succeeded(&self) -> bool {
        self.status == Some(0)
    }

    /// The lines of the host's log that tell of a fault: warnings, oopses, lockdep, stalls.
    pub fn faults(&self) -> Vec<&str> {
        let log = if self.dmesg.is_empty() { &self.console } else { &self.dmesg };
        // Linux complains of what Bochs's processor says of itself; that was before anything of ours.
        let log = log.split_once(STARTED).map_or(log.as_str(), |(_, after)| after);
        const SIGNS: [&str; 20] = [
            "WARNING:",
            "BUG:",
            "kernel BUG",
            "Oops",
            "general protection fault",
            "Call Trace",
            "unable to handle",
            "invalid opcode:",
            "stall",
            "soft lockup",
            "hung task",
            "scheduling while atomic",
            "Kernel panic",
            "refcount_t",
            // What a debug kernel says.
            "KASAN:",
            "UBSAN:",
            "possible circular locking",
            "possible recursive locking",
            "inconsistent lock state",
            "unreferenced object",
        ];
        log.lines().filter(|line| SIGNS.iter().any(|s| line.contains(s))).collect()
    }

    /// Why the module did not load, in its own words or the kernel's; `None` when it loaded or never was asked to.
    pub fn refusal(&self) -> Option<String> {
        if self.loaded != Some(false) {
            return None;
        }
        // A parameter that a module lacks does not keep it from going on to say that it is there.
        let unknown = self.dmesg.lines().find(|line| line.contains("unknown parameter"));
        let said = |line: &&str| {
            ["gannet: ", "kvm_amd: ", "kvm_intel: ", "kvm: "].iter().any(|s| line.contains(s))
        };
        let line = unknown.or_else(|| self.dmesg.lines().rev().find(said));
        let Some(line) = line else { return Some("the module does not load".to_owned()) };
        Some(untimed(line).to_owned())
    }

    /// The last lines of the console.
    pub fn tail(&self, lines: usize) -> String {
        let all: Vec<&str> = self.console.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// A line of the kernel's log without its time, so that the same said twice reads the same.
pub fn untimed(line: &str) -> &str {
    line.split_once("] ").map_or(line, |(_, text)| text)
}

/// Runs a job to the end of its machine. What the console shows is given to `on_event` as it comes.
///
/// Fails when the emulator cannot be started or ends badly, or when the machine is given up
/// ([`crate::Patience`]); a command that fails, or a host that panics, is an
/// [`Outcome`].
pub fn run(layout: &Layout, job: &Job, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Outcome> {
    match attempt(layout, job, on_event) {
        // Before the machine has begun: nothing of it was told.
        Err(error) if found_no_port(&error) => attempt(layout, job, on_event),
        done => done,
    }
}

/// Whether Bochs has found no network port for its picture, which nobody looks at: of two that begin at once one may find none.
fn found_no_port(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("RFB could not bind any port")
}

fn attempt(layout: &Layout, job: &Job, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Outcome> {
    let folder = scratch_folder(layout)?;
    let result = run_in(layout, job, &folder, on_event);
    match result {
        Ok(outcome) => {
            std::fs::remove_dir_all(&folder)?;
            Ok(outcome)
        }
        Err(error) => Err(error.context(format!("kept for inspection: {}", folder.display()))),
    }
}

fn scratch_folder(layout: &Layout) -> Result<PathBuf> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let folder = layout.out.join("runs").join(format!("{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// A process that does not outlive us when we leave early.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run_in(
    layout: &Layout,
    job: &Job,
    folder: &Path,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome> {
    let initramfs = folder.join("initramfs");
    std::fs::write(&initramfs, job.initramfs(layout)?)?;
    let (back, counts) = (folder.join("back"), folder.join("counts"));
    let mut command = match job.machine.emulator() {
        Emulator::Qemu => emulator(layout, job, &initramfs, &back, &counts),
        Emulator::Bochs => bochs::command(layout, job, folder, &initramfs, &counts)?,
    };
    let errors = std::fs::File::create(folder.join("emulator.log"))?;
    let (monitor, theirs) = UnixStream::pair()?;
    monitor.set_nonblocking(true)?;
    let stdin = match job.machine.emulator() {
        Emulator::Qemu => OwnedFd::from(theirs).into(),
        Emulator::Bochs => Stdio::null(),
    };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(errors);
    let spawned = command.spawn();
    drop(command);
    let mut process = Ended(spawned.context("starting the emulator")?);
    let clock = Clock::start(process.0.id());
    let output = process.0.stdout.take().context("the emulator's output")?;
    // The kernel's own console, where it is not the one that is followed.
    let serial = || {
        let text = std::fs::read(folder.join("serial")).unwrap_or_default();
        String::from_utf8_lossy(&text).replace('\r', "")
    };
    let mut console = Console::default();
    let mut port = bochs::DebugPort::default();
    let mut monitor = monitor;
    let followed = follow(job, &clock, output, &mut monitor, &mut console, &mut port, on_event);
    if let Err(reason) = followed {
        let ran = clock.elapsed().as_secs();
        let text = console.text + &serial();
        let mut tail = Outcome { console: text, ..Outcome::default() }.tail(15);
        if job.machine.emulator() == Emulator::Qemu {
            let state = state(&mut monitor);
            // The reason is to be told, whatever becomes of the file.
            let _ = std::fs::write(folder.join("state"), &state);
            tail = format!("{tail}\n{}", positions(&state));
        }
        bail!("{reason} (it ran for {ran} s); it ends with:\n{tail}");
    }
    let status = process.0.wait()?;
    let log = || std::fs::read_to_string(folder.join("emulator.log")).unwrap_or_default();
    let bochs = job.machine.emulator() == Emulator::Bochs;
    let ended_well = status.success() || (bochs && bochs::ended_well(&log()));
    if !ended_well {
        let log = log();
        let log: Vec<&str> = log.lines().filter(|l| !l.contains("TCG doesn't support")).collect();
        bail!("the emulator ended with {status}: {}", log.join("\n"));
    }
    let mut outcome =
        Outcome { console: console.text, took: clock.elapsed(), ..Outcome::default() };
    let back = match job.machine.emulator() {
        Emulator::Qemu => std::fs::read(&back).unwrap_or_default(),
        Emulator::Bochs => port.finish(),
    };
    read_back(&back, &mut outcome);
    if outcome.status.is_none() {
        outcome.console.push_str(&serial());
    }
    if job.plugin.is_some() {
        outcome.counts = read_counts(&std::fs::read_to_string(&counts).unwrap_or_default())?;
    }
    Ok(outcome)
}

/// Follows the console to the emulator's end, or to the end of our patience.
fn follow(
    job: &Job,
    clock: &Clock,
    mut output: ChildStdout,
    monitor: &mut UnixStream,
    console: &mut Console,
    port: &mut bochs::DebugPort,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<(), GivenUp> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0u8; 4096];
        while let Ok(n) = output.read(&mut buffer) {
            if n == 0 || send.send(buffer[..n].to_vec()).is_err() {
                break;
            }
        }
    });
    let mut watch = Watch::new(job.patience);
    loop {
        let left = watch.left(clock.now());
        // What has come is read before a machine is given up.
        match receive.recv_timeout(left.unwrap_or_default().min(SILENCE)) {
            Ok(bytes) => {
                watch.heard(clock.now());
                let mut take = |text: &[u8]| {
                    console.take(text, &mut |line| on_event(Event::Line(line)));
                };
                match job.machine.emulator() {
                    Emulator::Qemu => take(&bytes),
                    Emulator::Bochs => port.take(&bytes, &mut take),
                }
                if let Some(text) = console.pending() {
                    on_event(Event::Pending(&text));
                }
                // Who prints without end is never silent.
                if let Err(reason @ GivenUp::Longest(_)) = left {
                    return Err(reason);
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                left?;
                // Counted instructions are the same every time only without it, and there nothing is lost.
                if !job.counting && job.machine.emulator() == Emulator::Qemu {
                    tap(monitor, job.kernel);
                }
            }
        }
    }
    console.finish(&mut |line| on_event(Event::Line(line)));
    Ok(())
}

/// How long a machine may be silent before it is tapped.
const SILENCE: Duration = Duration::from_secs(3);

/// Presses a key that means nothing. The emulator loses a timer interrupt now and then: the host sleeps with the interrupt pending in
/// its local APIC and nothing ever comes, until any other interrupt makes the APIC look again (docs/lab.md).
fn tap(monitor: &mut UnixStream, kernel: Kernel) {
    let mut answers = [0; 4096];
    while monitor.read(&mut answers).is_ok_and(|n| n > 0) {}
    let by = match kernel {
        // Small: it has no driver of a keyboard, so that its interrupt is masked. The serial port's is open while the
        // console is, which echoes nothing (`lab/host-init.sh`). Debian's kernels take a break for a SysRq.
        Kernel::Debug => "chardev-send-break serial0\n",
        Kernel::V6_1 | Kernel::V6_12 | Kernel::V7_3 => "sendkey shift\n",
    };
    // A monitor that has gone away belongs to a machine that is ending.
    let _ = monitor.write_all(by.as_bytes());
}

/// What the emulator's monitor says of a machine that is given up: every CPU's registers, twice, a second apart, and its local APICs
/// and interrupt controllers. Empty when the emulator itself stands still.
fn state(monitor: &mut UnixStream) -> String {
    const QUESTIONS: [&str; 3] =
        ["info registers -a\n", "info registers -a\n", "info pic\ninfo lapic 0\ninfo lapic 1\n"];
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    for question in QUESTIONS {
        let _ = monitor.write_all(question.as_bytes());
        std::thread::sleep(Duration::from_secs(1));
        while let Ok(n @ 1..) = monitor.read(&mut buffer) {
            text.extend_from_slice(&buffer[..n]);
        }
    }
    String::from_utf8_lossy(&text).replace('\r', "")
}

/// The lines of a state that tell where each CPU stands.
fn positions(state: &str) -> String {
    let mut lines = String::from("where its CPUs stand, twice, a second apart:\n");
    for line in state.lines().filter(|l| l.starts_with("CPU#") || l.contains("RIP=")) {
        lines.push_str(line);
        lines.push('\n');
    }
    lines
}

fn emulator(layout: &Layout, job: &Job, initramfs: &Path, back: &Path, counts: &Path) -> Command {
    // A machine ends with whoever started it, also when that is killed.
    let mut command = layout.tool("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(layout.program("qemu"));
    command.args(["-accel", "tcg,thread=single", "-machine", "q35"]);
    command.args(["-cpu", &job.processor, "-m", &format!("{}M", job.memory)]);
    command.args(["-smp", &job.cpus.to_string(), "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-no-reboot", "-serial", "file:/dev/stdout"]);
    command.args(["-chardev", "socket,id=monitor,fd=0", "-mon", "monitor"]);
    command.arg("-serial").arg(format!("file:{}", back.display()));
    command.arg("-kernel").arg(layout.vmlinux(job.kernel)).arg("-initrd").arg(initramfs);
    // cryptomgr.notests: the kernel's self-tests of its ciphers run on in the background for seconds and
    // would compete with what is measured.
    let append = format!(
        "console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable nokaslr panic=-1 \
         random.trust_cpu=on cryptomgr.notests {}",
        job.append
    );
    command.args(["-append", append.trim_end()]);
    if job.counting {
        command.args(["-icount", "shift=0,sleep=off", "-seed", "1"]);
        command.args(["-rtc", "base=2026-01-01,clock=vm"]);
    }
    if let Some(plugin) = &job.plugin {
        let argument = format!("{},out={}", plugin.display(), counts.display());
        command.args(["-plugin", &argument]);
    }
    command
}

/// Cuts the console into lines. A carriage return before the line's end is the terminal's, not the program's.
#[derive(Default)]
struct Console {
    text: String,
    line: Vec<u8>,
}

impl Console {
    fn take(&mut self, bytes: &[u8], on_line: &mut dyn FnMut(&str)) {
        for byte in bytes {
            match byte {
                b'\n' => self.finish_line(on_line),
                _ => self.line.push(*byte),
            }
        }
    }

    /// What stands on the unfinished line after its last return to the margin: a progress display.
    fn pending(&self) -> Option<String> {
        let line = String::from_utf8_lossy(&self.line);
        let shown = line.rsplit('\r').next()?.trim_start_matches("\x1b[K").trim();
        (!shown.is_empty()).then(|| shown.to_owned())
    }

    fn finish(&mut self, on_line: &mut dyn FnMut(&str)) {
        if !self.line.is_empty() {
            self.finish_line(on_line);
        }
    }

    fn finish_line(&mut self, on_line: &mut dyn FnMut(&str)) {
        let line = String::from_utf8_lossy(&self.line);
        let line = line.trim_end_matches('\r');
        // A progress display that was wiped leaves nothing.
        let line = line.rsplit("\r\x1b[K").next().unwrap_or_default();
        on_line(line);
        self.text.push_str(line);
        self.text.push('\n');
        self.line.clear();
    }
}

/// Reads what `host-init.sh` sent: `FILE name size`, a line feed, and that many bytes, for each file.
fn read_back(mut bytes: &[u8], outcome: &mut Outcome) {
    while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let mut words = head.split(' ');
        let (Some("FILE"), Some(name), Some(size)) = (words.next(), words.next(), words.next())
        else {
            return;
        };
        let Ok(size) = size.parse::<usize>() else { return };
        let Some(content) = bytes.get(end + 1..end + 1 + size) else { return };
        bytes = &bytes[end + 1 + size..];
        let text = || String::from_utf8_lossy(content).trim().to_owned();
        match name {
            ".loaded" => outcome.loaded = Some(text() == "0"),
            ".status" => outcome.status = text().parse().ok(),
            ".dmesg" => outcome.dmesg = text(),
            _ => drop(outcome.files.insert(name.to_owned(), content.to_vec())),
        }
    }
}

/// Reads the plugin's records: one flat JSON object of numbers per line.
fn read_counts(text: &str) -> Result<Vec<Counts>> {
    text.lines()
        .map(|line| {
            let inner = line.strip_prefix('{').and_then(|l| l.strip_suffix('}'));
            let inner = inner.with_context(|| format!("a record of the plugin: {line}"))?;
            inner
                .split(',')
                .map(|pair| {
                    let (name, count) = pair.split_once(':').context("a pair without a colon")?;
                    Ok((name.trim_matches('"').to_owned(), count.parse()?))
                })
                .collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_is_given_up_tells_where_its_cpus_stand() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.write_all(b"\r\nCPU#0\r\nRAX=1 RBX=2\r\nRIP=3 RFL=4 HLT=1\r\nES =0\r\n").unwrap();
        let state = state(&mut ours);
        assert!(state.contains("RAX=1"));
        let (_, cpus) = state.split_once("CPU#0\n").unwrap();
        assert!(cpus.starts_with("RAX=1 RBX=2\n"), "{cpus}");
        let told = positions(&state);
        assert!(told.ends_with("apart:\nCPU#0\nRIP=3 RFL=4 HLT=1\n"), "{told}");
        let mut asked = [0; 18];
        theirs.read_exact(&mut asked).unwrap();
        assert_eq!(&asked, b"info registers -a\n");
    }

    #[test]
    fn a_machine_without_a_port_for_its_picture_begins_again() {
        let without = "the emulator ended with signal: 11: [RFB   ] RFB could not bind any port between 5900 and 5949";
        let error = anyhow::anyhow!(without).context("kept for inspection: x");
        assert!(found_no_port(&error));
        assert!(!found_no_port(&anyhow::anyhow!("the emulator ended with signal: 11")));
    }

    #[test]
    fn what_the_machine_sent_back_is_read() {
        let mut outcome = Outcome::default();
        let sent = b"FILE .loaded 2\n0\nFILE .status 2\n3\nFILE a.json 4\n{\n}\nFILE cut 9\n123";
        read_back(sent, &mut outcome);
        assert_eq!((outcome.loaded, outcome.status), (Some(true), Some(3)));
        assert_eq!(outcome.files.get("a.json").map(Vec::as_slice), Some(&b"{\n}\n"[..]));
        assert!(!outcome.files.contains_key("cut"), "a truncated file is no file");
    }

    #[test]
    fn plugin_records_are_read_in_order() {
        let counts = read_counts("{\"rdmsr\":3,\"vmrun\":1}\n{\"rdmsr\":0}\n").unwrap();
        assert_eq!(counts[0]["rdmsr"], 3);
        assert_eq!(counts[1]["rdmsr"], 0);
        assert!(read_counts("{\"rdmsr\":").is_err());
    }

    #[test]
    fn console_lines_lose_their_carriage_return_only() {
        let mut console = Console::default();
        let mut lines = Vec::new();
        console.take(b"one\r\ntw", &mut |l| lines.push(l.to_owned()));
        console.take(b"o\nlast", &mut |l| lines.push(l.to_owned()));
        console.finish(&mut |l| lines.push(l.to_owned()));
        assert_eq!(lines, ["one", "two", "last"]);
    }

    #[test]
    fn a_progress_display_is_pending_and_leaves_no_line() {
        let mut console = Console::default();
        let mut lines = Vec::new();
        console.take(b"\r\x1b[K[1/2] cpuid", &mut |_| ());
        assert_eq!(console.pending().as_deref(), Some("[1/2] cpuid"));
        console.take(b"\r\x1b[Kdone\r\n", &mut |l| lines.push(l.to_owned()));
        assert_eq!((lines, console.pending()), (vec!["done".to_owned()], None));
    }

    #[test]
    fn a_module_that_refuses_is_heard() {
        let dmesg =
            "[    1.0] systemd: up\n[    2.5] gannet: npt=0 is not implemented\n[    2.6] x";
        let outcome = |loaded| Outcome { dmesg: dmesg.into(), loaded, ..Outcome::default() };
        let refused = outcome(Some(false)).refusal();
        assert_eq!(refused.as_deref(), Some("gannet: npt=0 is not implemented"));
        let ignored = "[ 1.0] gannet: unknown parameter 'x' ignored\n[ 1.1] gannet: ready";
        let unknown = Outcome { dmesg: ignored.into(), ..outcome(Some(false)) };
        assert_eq!(unknown.refusal().as_deref(), Some("gannet: unknown parameter 'x' ignored"));
        assert_eq!(outcome(Some(true)).refusal(), None);
        assert_eq!(outcome(None).refusal(), None, "the machine ended before");
    }

    #[test]
    fn what_the_boot_complained_of_is_no_fault_of_the_job() {
        let dmesg = format!("[1] WARNING: a\n[2] {STARTED}\n[3] BUG: b");
        let outcome = Outcome { dmesg, ..Outcome::default() };
        assert_eq!(outcome.faults(), ["[3] BUG: b"]);
    }

    #[test]
    fn a_warning_in_the_log_is_a_fault() {
        let outcome = Outcome {
            dmesg: "[1] fine\n[2] WARNING: CPU: 0 PID: 1 at x.c".into(),
            ..Outcome::default()
        };
        assert_eq!(outcome.faults().len(), 1);
    }
}
