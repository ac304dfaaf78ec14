//! An irqfd with a resample eventfd that goes, beside its signals and beside an end of its interrupt.

use gannet_models::{explore, fails_with};
use loom::{
    sync::{Arc, Mutex},
    thread,
};
use vm::irq::disconnect_in_order;

/// What the interrupt lock protects.
#[derive(Default)]
struct Irqs {
    high: bool,
    /// The resampler is listed.
    listed: bool,
}

#[derive(Default)]
struct Model {
    /// The eventfd's own lock, outermost: somebody hears of its signals.
    watched: Mutex<bool>,
    irqs: Mutex<Irqs>,
    /// Signals of the resample eventfd.
    told: Mutex<u32>,
}

impl Model {
    fn signal(&self) {
        let watched = self.watched.lock().unwrap();
        if *watched {
            self.irqs.lock().unwrap().high = true;
        }
    }

    /// `IrqCore::eoi`: the listeners are told after the interrupt lock, for one may come back.
    fn end(&self) {
        let mut irqs = self.irqs.lock().unwrap();
        let told = irqs.listed && std::mem::take(&mut irqs.high);
        drop(irqs);
        if told {
            *self.told.lock().unwrap() += 1;
        }
    }

    /// `remove_resampler`, for the last one of a GSI.
    fn lower(&self) {
        *self.irqs.lock().unwrap() = Irqs::default();
    }
}

/// Dropped, it hears no more: as `host::event::Watch`, which waits for a signal that is under way.
struct Watch(Arc<Model>);

impl Drop for Watch {
    fn drop(&mut self) {
        *self.0.watched.lock().unwrap() = false;
    }
}

fn goes_beside_signals(disconnect: fn(Watch, &Model)) {
    explore(3, move || {
        let model = Arc::new(Model::default());
        *model.watched.lock().unwrap() = true;
        model.irqs.lock().unwrap().listed = true;
        let (a, b) = (model.clone(), model.clone());
        let device = thread::spawn(move || a.signal());
        let vcpu = thread::spawn(move || b.end());
        disconnect(Watch(model.clone()), &model);
        device.join().unwrap();
        vcpu.join().unwrap();
        let stuck = model.irqs.lock().unwrap().high;
        assert!(!stuck, "stuck: a line is high that nobody drives");
    });
}

#[test]
fn a_line_is_down_when_its_irqfd_has_gone() {
    goes_beside_signals(|watch, model| disconnect_in_order(watch, || model.lower()));
}

#[test]
fn a_line_that_is_lowered_before_the_watch_goes_is_found_out() {
    assert!(fails_with("stuck", || goes_beside_signals(|watch, model| {
        model.lower();
        drop(watch);
    })));
}
