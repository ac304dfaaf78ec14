//! `exitbench plot`: reports as bars, a group for each workload, in an SVG file. The same reports always give the same file.

use std::path::Path;

use anyhow::{Result, bail};
use plotters::coord::types::RangedCoordf64;
use plotters::element::{EmptyElement, PathElement, Rectangle, Text};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::cli::PlotArguments;
use crate::report::{Measure, Report, write};

/// Pixels: of the whole from left to right, of the names, of a bar, of what is above and below the bars.
const WIDTH: u32 = 900;
const NAMES: u32 = 150;
const BAR: u32 = 11;
const ABOVE: u32 = 40;
const BELOW: u32 = 30;
/// Of a workload's height, which is 1, what is left free between it and the next.
const GAP: f64 = 0.25;

/// A colour for each report.
const COLOURS: [RGBColor; 8] = [
    RGBColor(230, 160, 30),
    RGBColor(30, 120, 180),
    RGBColor(60, 150, 80),
    RGBColor(190, 80, 80),
    RGBColor(130, 100, 170),
    RGBColor(120, 120, 120),
    RGBColor(90, 190, 200),
    RGBColor(160, 110, 60),
];

/// What is drawn.
struct Picture {
    /// What the axis tells.
    axis: String,
    logarithmic: bool,
    labels: Vec<String>,
    groups: Vec<(String, Vec<Option<Bar>>)>,
}

/// The bar of one workload in one report.
#[derive(Clone, Debug, PartialEq)]
struct Bar {
    length: f64,
    /// The quartiles between which half of the repetitions lie; `None` where there is one alone.
    error: Option<[f64; 2]>,
    text: String,
}

/// `exitbench plot`.
pub fn command(arguments: &PlotArguments) -> Result<bool> {
    let reports: Vec<Report> =
        arguments.reports.iter().map(|path| Report::read(path)).collect::<Result<_>>()?;
    let names: Vec<String> = arguments.reports.iter().map(|path| label(path)).collect();
    let relative = reports.len() > 1 && !arguments.absolute;
    let (picture, missing) = Picture::of(&reports, names, relative)?;
    for text in missing {
        eprintln!("{text}");
    }
    write(&arguments.output, &picture.draw()?)?;
    Ok(true)
}

fn label(path: &Path) -> String {
    path.file_stem()
        .map_or_else(|| path.display().to_string(), |stem| stem.to_string_lossy().into())
}

impl Picture {
    /// The picture of the reports, and which workloads are not in it, or not of every report, and why.
    fn of(reports: &[Report], names: Vec<String>, relative: bool) -> Result<(Self, Vec<String>)> {
        let measure = Measure::common(reports)?;
        let mut workloads: Vec<&str> = Vec::new();
        for entry in reports.iter().flat_map(|report| &report.workloads) {
            if !workloads.contains(&entry.name.as_str()) {
                workloads.push(&entry.name);
            }
        }
        let (mut groups, mut missing) = (Vec::new(), Vec::new());
        for name in workloads {
            let base = match reports[0].measurement(name) {
                _ if !relative => Some(1.0),
                first => {
                    first.map(|m| measure.of(0, m.summary.median)).filter(|median| *median > 0.0)
                }
            };
            let Some(base) = base else {
                missing.push(format!("{name} is left out: {} did not measure it", names[0]));
                continue;
            };
            let bars: Vec<Option<Bar>> = (0..reports.len())
                .map(|index| bar(&reports[index], &measure, index, name, relative.then_some(base)))
                .collect();
            let lacking = bars.iter().zip(&names).filter(|(bar, _)| bar.is_none());
            missing.extend(lacking.map(|(_, report)| format!("{report} did not measure {name}")));
            groups.push((name.to_owned(), bars));
        }
        if groups.iter().all(|(_, bars)| bars.iter().all(Option::is_none)) {
            bail!("there is nothing to draw: no workload was measured");
        }
        let axis = match relative {
            true => format!("multiples of {}, whose figures are in {}", names[0], measure.unit),
            false => measure.unit.to_owned(),
        };
        let labels = names
            .iter()
            .zip(reports)
            .map(|(name, report)| {
                if *name == report.module {
                    name.clone()
                } else {
                    format!("{name}: {}", report.module)
                }
            })
            .collect();
        Ok((Self { axis, logarithmic: !relative, labels, groups }, missing))
    }

    /// The SVG.
    fn draw(&self) -> Result<String> {
        let mut svg = String::new();
        let (rows, reports) = (self.groups.len() as u32, self.labels.len() as u32);
        let legend = ABOVE + 18 * reports;
        let size = (WIDTH, legend + BELOW + rows * (BAR * reports + 9));
        {
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            root.fill(&WHITE)?;
            self.legend(&root)?;
            let (_, below) = root.split_vertically(legend);
            self.bars(&below)?;
            root.present()?;
        }
        Ok(svg)
    }

    fn legend(&self, area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<()> {
        let title = format!("What a VM exit costs: {}", self.axis);
        area.draw(&Text::new(title, (12, 12), ("sans-serif", 19)))?;
        for (at, label) in self.labels.iter().enumerate() {
            let (top, colour) = (ABOVE as i32 + 18 * at as i32, colour(at));
            area.draw(&Rectangle::new([(12, top), (24, top + 11)], colour.filled()))?;
            area.draw(&Text::new(label.clone(), (30, top - 1), ("sans-serif", 14)))?;
        }
        Ok(())
    }

    fn bars(&self, area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<()> {
        let place = |value: f64| if self.logarithmic { value.max(1.0).log10() } else { value };
        let lengths = self.groups.iter().flat_map(|(_, bars)| bars.iter().flatten());
        let longest =
            lengths.map(|bar| bar.error.map_or(bar.length, |[_, upper]| upper.max(bar.length)));
        let end = place(longest.fold(1.0, f64::max)) * 1.12;
        let height = self.groups.len() as f64;
        let mut chart = ChartBuilder::on(area)
            .margin_right(30)
            .x_label_area_size(BELOW)
            .y_label_area_size(NAMES)
            .build_cartesian_2d(0.0..end.max(0.1), 0.0..height)?;
        let tick = |value: &f64| match self.logarithmic {
            true => format!("{:.0}", 10f64.powf(*value)),
            false => format!("{value:.1}×"),
        };
        let ticks = if self.logarithmic { end.ceil() as usize + 1 } else { 8 };
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .max_light_lines(0)
            .x_labels(ticks)
            .x_label_formatter(&tick)
            .label_style(("sans-serif", 13))
            .draw()?;
        for (row, (name, bars)) in self.groups.iter().enumerate() {
            // The first workload is at the top.
            let top = height - row as f64 - GAP / 2.0;
            let style =
                ("sans-serif", 13).into_text_style(area).pos(Pos::new(HPos::Right, VPos::Center));
            let middle = top - (1.0 - GAP) / 2.0;
            chart.draw_series([
                EmptyElement::at((0.0, middle)) + Text::new(name.clone(), (-6, 0), style)
            ])?;
            for (index, bar) in bars.iter().enumerate() {
                let each = (1.0 - GAP) / bars.len() as f64;
                if let Some(bar) = bar {
                    draw_bar(
                        &mut chart,
                        bar,
                        colour(index),
                        [top - each * index as f64, each],
                        &place,
                    )?;
                }
            }
        }
        Ok(())
    }
}

fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

/// A bar from its upper edge down, what half of its repetitions reach, and its figure.
fn draw_bar<'a>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>,
    bar: &Bar,
    colour: RGBColor,
    [top, height]: [f64; 2],
    place: &dyn Fn(f64) -> f64,
) -> Result<()> {
    let (end, middle) = (place(bar.length), top - height / 2.0);
    chart
        .draw_series([Rectangle::new([(0.0, top), (end, top - height * 0.92)], colour.filled())])?;
    let mut reach = end;
    if let Some([lower, upper]) = bar.error.map(|error| error.map(place)) {
        reach = reach.max(upper);
        let cap = height * 0.25;
        let line = |points: [(f64, f64); 2]| PathElement::new(points, BLACK.stroke_width(1));
        let lines = [
            line([(lower, middle), (upper, middle)]),
            line([(lower, middle - cap), (lower, middle + cap)]),
            line([(upper, middle - cap), (upper, middle + cap)]),
        ];
        chart.draw_series(lines)?;
    }
    let style = TextStyle::from(("sans-serif", 11)).pos(Pos::new(HPos::Left, VPos::Center));
    let text = Text::new(bar.text.clone(), (4, 0), style);
    chart.draw_series([EmptyElement::at((reach, middle)) + text])?;
    Ok(())
}

/// A workload's bar in one report: in the reports' unit, or as a multiple of `base`.
fn bar(
    report: &Report,
    measure: &Measure,
    index: usize,
    name: &str,
    base: Option<f64>,
) -> Option<Bar> {
    let measured = report.measurement(name)?;
    let figure = |value: u64| measure.of(index, value) / base.unwrap_or(1.0);
    let length = figure(measured.summary.median);
    let error = measured.repetitions().map(|r| [figure(r.lower), figure(r.upper)]);
    let text = match base {
        Some(_) if index > 0 => format!("{length:.2}×"),
        _ => measure.show(measure.of(index, measured.summary.median)),
    };
    Some(Bar { length, error, text })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Unit;
    use crate::report::tests::{measured, report};

    fn pictured(reports: &[Report], relative: bool) -> Result<(Picture, Vec<String>)> {
        let names = (0..reports.len()).map(|index| format!("r{index}")).collect();
        Picture::of(reports, names, relative)
    }

    fn reports() -> [Report; 2] {
        let first = vec![measured("cpuid", &[1000, 2000, 3000]), measured("rdmsr", &[10])];
        let second = vec![measured("cpuid", &[500]), measured("ipi", &[9])];
        [report(Unit::Tsc, first), report(Unit::Tsc, second)]
    }

    #[test]
    fn bars_are_multiples_of_the_first_report() {
        let (picture, missing) = pictured(&reports(), true).unwrap();
        let (name, bars) = &picture.groups[0];
        let first = Bar { length: 1.0, error: Some([0.75, 1.25]), text: "2000".into() };
        let second = Bar { length: 0.25, error: None, text: "0.25×".into() };
        assert_eq!((name.as_str(), bars), ("cpuid", &vec![Some(first), Some(second)]));
        assert_eq!(picture.groups.len(), 2);
        let expected = ["r1 did not measure rdmsr", "ipi is left out: r0 did not measure it"];
        assert_eq!(missing, expected);
    }

    #[test]
    fn one_report_is_drawn_in_its_unit() {
        let (picture, missing) = pictured(&reports()[..1], false).unwrap();
        assert_eq!(picture.groups[0].1[0].as_ref().unwrap().text, "2000");
        assert!(picture.logarithmic && picture.axis == "TSC ticks" && missing.is_empty());
    }

    #[test]
    fn the_picture_has_names_figures_and_labels_and_is_the_same_each_time() {
        for relative in [true, false] {
            let svg = pictured(&reports(), relative).unwrap().0.draw().unwrap();
            for expected in ["<svg", "cpuid", "r1: kvm_amd", if relative { "0.25×" } else { "500" }]
            {
                assert!(svg.contains(expected), "{expected} is missing");
            }
            assert_eq!(svg, pictured(&reports(), relative).unwrap().0.draw().unwrap());
        }
    }

    #[test]
    fn what_is_in_a_name_stays_text() {
        let mut reports = reports();
        reports[0].workloads[0].name = "<script>".into();
        let svg = pictured(&reports[..1], false).unwrap().0.draw().unwrap();
        assert!(!svg.contains("<script>") && svg.contains("&lt;script&gt;"));
    }

    #[test]
    fn nothing_is_not_drawn_and_units_are_not_mixed() {
        assert!(pictured(&[report(Unit::Tsc, vec![])], false).is_err());
        let zero = [report(Unit::Tsc, vec![measured("a", &[0])]), report(Unit::Tsc, vec![])];
        assert!(pictured(&zero, true).is_err());
        let mixed = [report(Unit::Tsc, vec![]), report(Unit::Instructions, vec![])];
        assert!(pictured(&mixed, true).err().unwrap().to_string().contains("do not compare"));
    }
}
