//! The plots, as SVG: what a toggle costs as the guest's page tables grow, and exits by reason of the timer workloads.

use super::plan::{PAGES, paged};
use super::results::{Numbers, Results};
use anyhow::Result;
use plotters::coord::ranged1d::IntoSegmentedCoord;
use plotters::coord::{CoordTranslate, Shift};
use plotters::prelude::*;
use std::collections::BTreeMap;

/// The runs in a plot of a toggle: title, name, colour, and the width of the line.
const LINES: [(&str, &str, RGBColor, u32); 6] = [
    ("stock", "stock KVM, TDP", RGBColor(200, 60, 40), 3),
    ("stock npt=0", "stock KVM, shadow", RGBColor(200, 60, 40), 1),
    ("gannet keep_roots=0", "Gannet, keep_roots=0, TDP", RGBColor(230, 160, 30), 3),
    ("gannet npt=0 keep_roots=0", "Gannet, keep_roots=0, shadow", RGBColor(230, 160, 30), 1),
    ("gannet", "Gannet, TDP", RGBColor(30, 120, 180), 3),
    ("gannet npt=0", "Gannet, shadow", RGBColor(30, 120, 180), 1),
];

/// The bars of a timer workload: label and run.
const SIDES: [(&str, &str); 3] =
    [("stock", "stock"), ("off", "gannet lazy_tscdeadline=0"), ("on", "gannet")];

/// Every plot that there are figures for, by its file's name: of a toggle, and of the timer workloads.
pub fn plots(results: &Results, toggle: &str) -> Result<BTreeMap<String, String>> {
    let all = [
        (toggle, svg(|area| toggles(area, results, toggle, 8))?),
        (&format!("{toggle}_all"), svg(|area| toggles(area, results, toggle, u64::MAX))?),
        ("timer_exits", svg(|area| exits(area, results))?),
    ];
    let file = |(name, svg): (&str, _)| Some((format!("{}{name}.svg", results.prefix()), svg?));
    Ok(all.into_iter().filter_map(file).collect())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Builder<'a, 'b> = ChartBuilder<'a, 'b, SVGBackend<'b>>;

/// A plot as the text of its file; `None` where there was nothing to draw.
fn svg(draw: impl FnOnce(&Area<'_>) -> Result<bool>) -> Result<Option<String>> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (900, 520)).into_drawing_area();
    area.fill(&WHITE)?;
    let drawn = draw(&area)?;
    area.present()?;
    drop(area);
    Ok(drawn.then_some(svg))
}

/// A chart before its axes: every one has its caption and margins from here.
fn chart<'a, 'b>(area: &'a Area<'b>, caption: &str, below: i32) -> Builder<'a, 'b> {
    let mut chart = ChartBuilder::on(area);
    chart.caption(caption, ("sans-serif", 19)).margin(12);
    chart.x_label_area_size(below).y_label_area_size(86);
    chart
}

fn legend<'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, C>,
    at: SeriesLabelPosition,
    size: i32,
) -> Result<()> {
    let mut labels = chart.configure_series_labels();
    labels.position(at).background_style(WHITE.mix(0.85)).border_style(BLACK.mix(0.4));
    Ok(labels.label_font(("sans-serif", size)).draw()?)
}

/// The cost over the number of pages, of which at most so many are touched, on logarithmic axes.
fn toggles(area: &Area<'_>, results: &Results, toggle: &str, most: u64) -> Result<bool> {
    let changed = toggle.to_uppercase().replace('_', ".");
    let touched = if most == u64::MAX { "all".to_owned() } else { most.to_string() };
    let title = format!(
        "{changed} changed and changed back: the host's instructions, {touched} pages written to after each"
    );
    let lines = LINES.into_iter().filter_map(|(run, label, colour, width)| {
        let point = |pages: &u64| {
            let name = paged(toggle, *pages, most);
            let cost = results.figures(run, &name).ok()?.get("host.instructions")?;
            (cost > 0.0).then_some((*pages as f64, cost))
        };
        let points: Vec<(f64, f64)> = PAGES.iter().filter_map(point).collect();
        (points.len() > 1).then_some((label, colour.stroke_width(width), points))
    });
    let lines: Vec<_> = lines.collect();
    if lines.is_empty() {
        return Ok(false);
    }
    let costs = || lines.iter().flat_map(|(.., points)| points.iter().map(|(_, cost)| *cost));
    let (low, high) = (costs().fold(f64::MAX, f64::min), costs().fold(1.0, f64::max));
    let (pages, costs) = ((0.9..12_000.0).log_scale(), (low * 0.6..high * 2.5).log_scale());
    let mut chart = chart(area, &title, 42).build_cartesian_2d(pages, costs)?;
    let whole = |n: &f64| format!("{n:.0}");
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("pages mapped").y_desc("instructions per pair");
    mesh.x_label_formatter(&whole).y_label_formatter(&whole);
    mesh.label_style(("sans-serif", 14)).draw()?;
    for (label, style, points) in lines {
        let dot = ShapeStyle { filled: true, stroke_width: 1, ..style };
        let dots: Vec<_> = points.iter().map(|point| Circle::new(*point, 3, dot)).collect();
        let key = move |(x, y)| PathElement::new([(x, y), (x + 22, y)], style);
        chart.draw_series(LineSeries::new(points, style))?.label(label).legend(key);
        chart.draw_series(dots)?;
    }
    legend(&mut chart, SeriesLabelPosition::UpperLeft, 13).map(|()| true)
}

/// Exits by reason, with the mechanism off and on: per operation of the workload, and of the Linux guest's whole task.
fn exits(area: &Area<'_>, results: &Results) -> Result<bool> {
    let panel = |(name, unit)| {
        // A workload that was counted and had no exit has an empty bar.
        let bars = SIDES.iter().filter_map(|(label, run)| {
            let figures = results.figures(run, name).ok()?;
            (!figures.host.is_empty()).then_some((*label, &figures.exits))
        });
        let bars: Vec<(&str, _)> = bars.collect();
        (!bars.is_empty()).then_some((name, unit, bars))
    };
    let all = [("timer_rearm", "exits per operation"), ("pingpong", "exits of the task")];
    let panels: Vec<_> = all.into_iter().filter_map(panel).collect();
    let parts = area.split_evenly((1, panels.len().max(1)));
    for (part, (name, unit, bars)) in parts.iter().zip(&panels) {
        self::panel(part, name, unit, bars)?;
    }
    Ok(!panels.is_empty())
}

/// One workload: a stacked bar for each side.
fn panel(area: &Area<'_>, name: &str, unit: &str, bars: &[(&str, &Numbers)]) -> Result<()> {
    let most = bars.iter().map(|(_, exits)| exits.values().sum()).fold(0.0, f64::max).max(0.001);
    // Reasons by their weight, the greatest below.
    let mut weights = BTreeMap::<&str, f64>::new();
    for (reason, count) in bars.iter().flat_map(|(_, exits)| *exits) {
        *weights.entry(reason).or_default() += count;
    }
    let mut reasons: Vec<_> = weights.into_iter().filter(|(_, n)| *n >= most * 0.002).collect();
    reasons.sort_by(|a, b| b.1.total_cmp(&a.1));
    let sides = (0..bars.len() as i32 - 1).into_segmented();
    let mut chart = chart(area, name, 34).build_cartesian_2d(sides, 0.0..most * 1.45)?;
    let label = |at: &SegmentValue<i32>| match at {
        SegmentValue::CenterOf(n) => bars.get(*n as usize).map_or("", |bar| bar.0).to_owned(),
        _ => String::new(),
    };
    let count = |n: &f64| if most < 100.0 { format!("{n:.1}") } else { format!("{n:.0}") };
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh().y_desc(unit);
    mesh.x_label_formatter(&label).y_label_formatter(&count);
    mesh.label_style(("sans-serif", 14)).draw()?;
    let mut below = vec![0.0; bars.len()];
    for (index, (reason, _)) in reasons.into_iter().enumerate() {
        let colour = HSLColor(index as f64 * 0.618 % 1.0, 0.55, 0.5).to_rgba().filled();
        let boxes = (0..).zip(bars).zip(&mut below).map(|((bar, (_, exits)), below)| {
            let from = (SegmentValue::Exact(bar), *below);
            *below += exits.get(reason).copied().unwrap_or(0.0);
            let mut rectangle =
                Rectangle::new([from, (SegmentValue::Exact(bar + 1), *below)], colour);
            rectangle.set_margin(0, 0, 14, 14);
            rectangle
        });
        let key = move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour);
        chart.draw_series(boxes)?.label(reason).legend(key);
    }
    legend(&mut chart, SeriesLabelPosition::UpperRight, 12)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mechanisms::results::tests::{results, toggled};
    use serde_json::json;

    fn measured(machine: &str) -> Results {
        let figures = |n: u64| json!({"host": {"instructions": n + 1000}, "exits": {"wrmsr": 1.0}});
        let mut run = toggled("gannet", &["cr0_wp"], figures);
        run["workloads"]["timer_rearm"] = figures(0);
        results(machine, &[run])
    }

    #[test]
    fn there_is_a_plot_for_what_was_measured_and_none_for_the_rest() {
        let all = plots(&measured("amd"), "cr0_wp").unwrap();
        assert!(all["cr0_wp.svg"].contains("Gannet, TDP"));
        assert!(all["timer_exits.svg"].contains("wrmsr"));
        assert!(!all.contains_key("cr0_wp_all.svg"));
        assert!(plots(&Results::default(), "cr0_wp").unwrap().is_empty());
        let intel = measured("intel");
        let all = plots(&intel, "efer_nx").unwrap();
        assert_eq!(all.keys().collect::<Vec<_>>(), ["intel-timer_exits.svg"]);
        assert_eq!(plots(&intel, "efer_nx").unwrap(), all, "the same figures give the same plot");
    }
}
