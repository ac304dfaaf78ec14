//! In what the figures of several reports are told, so that they may stand side by side.

use anyhow::{Result, bail};

use super::{Report, Unit};

/// Clocks whose frequencies differ by less than this part are one clock.
const SAME_CLOCK: f64 = 0.001;

/// What the figures of several reports are told in.
pub struct Measure {
    /// The unit's name.
    pub unit: &'static str,
    /// What a figure of each report is multiplied by.
    factors: Vec<f64>,
    /// What the reader is to know of it.
    pub note: Option<String>,
}

impl Measure {
    /// That of all `reports`. Ticks of clocks that differ are told in nanoseconds; ticks and instructions are refused.
    pub fn common(reports: &[Report]) -> Result<Self> {
        let Some(unit) = reports.first().map(|report| report.unit) else {
            bail!("no report is named")
        };
        if let Some(other) = reports.iter().map(|report| report.unit).find(|other| *other != unit) {
            bail!(
                "the reports do not compare: one counts {}, another {}",
                unit.describe(),
                other.describe()
            );
        }
        let plain = |note| Self { unit: unit.describe(), factors: vec![1.0; reports.len()], note };
        let clocks: Option<Vec<u64>> = reports
            .iter()
            .map(|report| report.host.as_ref()?.tsc_khz.filter(|khz| *khz > 0))
            .collect();
        Ok(match clocks {
            _ if unit == Unit::Instructions || reports.len() == 1 => plain(None),
            None => plain(Some(
                "not every report tells its TSC's frequency: on one host ticks compare, on two perhaps not".into(),
            )),
            Some(clocks) if differ(&clocks) => Self {
                unit: "ns",
                factors: clocks.iter().map(|khz| 1e6 / *khz as f64).collect(),
                note: Some("the TSCs differ in frequency: figures are in nanoseconds".into()),
            },
            Some(_) => plain(None),
        })
    }

    /// A figure of the report at `index`.
    pub fn of(&self, index: usize, figure: u64) -> f64 {
        figure as f64 * self.factors.get(index).copied().unwrap_or(1.0)
    }

    /// A figure as it is shown.
    pub fn show(&self, figure: f64) -> String {
        if self.unit == "ns" { format!("{figure:.1}") } else { format!("{figure:.0}") }
    }
}

fn differ(clocks: &[u64]) -> bool {
    let (least, greatest) = (clocks.iter().min(), clocks.iter().max());
    let (least, greatest) = (least.copied().unwrap_or(1), greatest.copied().unwrap_or(1));
    (greatest - least) as f64 > least as f64 * SAME_CLOCK
}

#[cfg(test)]
mod tests {
    use super::super::Host;
    use super::super::tests::report;
    use super::*;

    fn on(unit: Unit, tsc_khz: Option<u64>) -> Report {
        Report { host: Some(Host { tsc_khz, ..Host::default() }), ..report(unit, vec![]) }
    }

    #[test]
    fn different_units_are_refused() {
        let both = [on(Unit::Tsc, None), on(Unit::Instructions, None)];
        let error = Measure::common(&both).err().unwrap().to_string();
        assert!(error.contains("one counts TSC ticks, another instructions"), "{error}");
        assert!(Measure::common(&[]).is_err());
    }

    #[test]
    fn clocks_of_one_frequency_count_ticks() {
        let both = [on(Unit::Tsc, Some(2_000_000)), on(Unit::Tsc, Some(2_000_100))];
        let measure = Measure::common(&both).unwrap();
        assert_eq!((measure.unit, measure.note.as_deref()), ("TSC ticks", None));
        assert_eq!(measure.show(measure.of(1, 300)), "300");
    }

    #[test]
    fn clocks_of_two_frequencies_are_told_in_time() {
        let both = [on(Unit::Tsc, Some(2_000_000)), on(Unit::Tsc, Some(4_000_000))];
        let measure = Measure::common(&both).unwrap();
        assert_eq!((measure.of(0, 300), measure.of(1, 300)), (150.0, 75.0));
        assert_eq!((measure.unit, measure.show(75.0).as_str()), ("ns", "75.0"));
        assert!(measure.note.is_some());
    }

    #[test]
    fn a_frequency_that_nobody_knows_is_said_where_it_matters() {
        let note = |reports: &[Report]| Measure::common(reports).unwrap().note;
        assert!(note(&[on(Unit::Tsc, Some(5)), on(Unit::Tsc, None)]).is_some());
        assert!(note(&[on(Unit::Tsc, Some(5)), report(Unit::Tsc, vec![])]).is_some());
        assert!(note(&[on(Unit::Tsc, Some(5)), on(Unit::Tsc, Some(0))]).is_some());
        assert!(note(&[on(Unit::Tsc, None)]).is_none());
        assert!(note(&[on(Unit::Instructions, None), on(Unit::Instructions, Some(5))]).is_none());
    }
}
