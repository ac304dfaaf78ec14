//! Live progress of steps that take longer than a moment: a bar where the length is known from last time, else a spinner; plain lines
//! where the output is no terminal. How long each step took is kept in `target/lab/timings`.

use gannet_lab::Layout;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One step under way; ends when dropped.
pub struct Step {
    bar: ProgressBar,
    title: String,
    started: Instant,
    timings: PathBuf,
    running: Arc<AtomicBool>,
}

impl Step {
    /// Starts a step. The title also names its remembered length.
    pub fn start(layout: &Layout, title: &str) -> Self {
        let timings = layout.out.join("timings");
        let running = Arc::new(AtomicBool::new(true));
        let terminal = std::io::stderr().is_terminal();
        let bar = match read(&timings).get(title).filter(|_| terminal) {
            Some(expected) => {
                let bar = ProgressBar::new((*expected).max(1));
                bar.set_style(style("{prefix} [{bar:25.green}] {elapsed} of ~{len_s} {wide_msg}"));
                let (ticker, alive, started) = (bar.clone(), running.clone(), Instant::now());
                std::thread::spawn(move || {
                    while alive.load(Ordering::Relaxed) {
                        let full = ticker.length().unwrap_or(1);
                        ticker.set_position((started.elapsed().as_millis() as u64).min(full));
                        std::thread::sleep(Duration::from_millis(150));
                    }
                });
                bar
            }
            None if terminal => {
                let bar = ProgressBar::new_spinner();
                bar.set_style(style("{prefix} {spinner:.green} {elapsed} {wide_msg}"));
                bar.enable_steady_tick(Duration::from_millis(150));
                bar
            }
            None => {
                eprintln!("{title} …");
                ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden())
            }
        };
        bar.set_prefix(title.to_owned());
        Self { bar, title: title.to_owned(), started: Instant::now(), timings, running }
    }

    /// Shows what the step does just now.
    pub fn say(&self, message: &str) {
        self.bar.set_message(message.trim().to_owned());
    }

    /// Prints lines that stay.
    pub fn beside(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// Ends the step well and remembers its length.
    pub fn done(self) {
        let mut all = read(&self.timings);
        all.insert(self.title.clone(), self.started.elapsed().as_millis() as u64);
        let text: String = all.iter().map(|(title, ms)| format!("{ms} {title}\n")).collect();
        // Only the next progress bar is poorer without it.
        let _ = std::fs::write(&self.timings, text);
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.running.store(false, Ordering::Relaxed);
        self.bar.finish_and_clear();
    }
}

/// Performs tasks two at a time, and has `step` show how many are done and what each worker says. What came of them, in their order.
pub fn two_at_a_time<T: Send, R: Send>(
    step: &Step,
    tasks: Vec<T>,
    perform: impl Fn(&dyn Fn(String), T) -> R + Sync,
) -> Vec<R> {
    let total = tasks.len();
    let queue = Mutex::new(tasks.into_iter().enumerate());
    let results = Mutex::new(BTreeMap::new());
    let shown = Mutex::new([const { String::new() }; 2]);
    let say = |worker: usize, text: String| {
        let done = whole(&results).len();
        let mut shown = whole(&shown);
        shown[worker] = text;
        step.say(&format!("{done}/{total}  {}", shown.join("  ")));
    };
    let next = || whole(&queue).next();
    let work = |worker| {
        while let Some((number, task)) = next() {
            let result = perform(&|text| say(worker, text), task);
            whole(&results).insert(number, result);
            say(worker, String::new());
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| work(1));
        work(0);
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// What a worker that panicked left is still whole: each change is one step or one insertion.
fn whole<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .with_key("len_s", |state: &indicatif::ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{} s", state.len().unwrap_or(0).div_ceil(1000));
        })
        .progress_chars("=> ")
}

fn read(file: &std::path::Path) -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (ms, title) = line.split_once(' ')?;
            Some((title.to_owned(), ms.parse().ok()?))
        })
        .collect()
}
