//! Owns the pictures of a run, as SVG.
//!
//! Invariant: axes of time are logarithmic and say their unit; a picture without points is not
//! drawn.

use std::path::Path;

use hdrhistogram::Histogram;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::error::BenchError;
use crate::figures::{SAMPLES_BEYOND_MIN, quantile};
use crate::measure::Second;
use crate::plan::Mark;

const SIZE: (u32, u32) = (960, 540);
const TALL: (u32, u32) = (960, 760);
const FONT: &str = "sans-serif";
/// Points of a percentile curve for each nine.
const POINTS_PER_NINE: u32 = 20;
/// Shortest time of an axis, in milliseconds.
const AXIS_LEAST_MS: f64 = 0.01;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A line with its name.
pub struct Series {
    /// Name.
    pub name: String,
    /// Points.
    pub points: Vec<(f64, f64)>,
}

fn failed(path: &Path) -> impl Fn(String) -> BenchError {
    let path = path.display().to_string();
    move |error| BenchError::Option(format!("draw {path}: {error}"))
}

fn ends(series: &[Series]) -> Option<(f64, f64, f64)> {
    let points = || series.iter().flat_map(|one| &one.points);
    let most_x = points().map(|(x, _)| *x).fold(0.0, f64::max);
    let least_y = points().map(|(_, y)| *y).fold(f64::MAX, f64::min);
    let most_y = points().map(|(_, y)| *y).fold(0.0, f64::max);
    (most_x > 0.0 && most_y > 0.0).then_some((most_x, least_y.max(AXIS_LEAST_MS), most_y))
}

/// Lines of times in milliseconds over anything.
fn lines_of_times(
    area: &Area<'_>,
    title: &str,
    x_name: &str,
    x_label: &dyn Fn(&f64) -> String,
    series: &[Series],
    marks: &[Mark],
) -> Result<(), String> {
    let Some((most_x, least_y, most_y)) = ends(series) else {
        return Ok(());
    };
    let text = |error: DrawingAreaErrorKind<_>| format!("{error:?}");
    let y = (least_y / 1.5..most_y * 1.5).log_scale();
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..most_x * 1.02, y)
        .map_err(text)?;
    chart
        .configure_mesh()
        .x_desc(x_name)
        .y_desc("milliseconds")
        .light_line_style(BLACK.mix(0.04))
        .x_label_formatter(&|x| x_label(x))
        .y_label_formatter(&|y| short(*y))
        .draw()
        .map_err(text)?;
    for (number, one) in series.iter().enumerate() {
        let colour = Palette99::pick(number).to_rgba();
        let points = one.points.iter().map(|(x, y)| (*x, y.max(least_y)));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))
            .map_err(text)?
            .label(one.name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    for mark in marks {
        let line = [(mark.at_s, least_y / 1.5), (mark.at_s, most_y * 1.5)];
        let style = BLACK.mix(0.5).stroke_width(1);
        chart
            .draw_series([PathElement::new(line, style)])
            .map_err(text)?;
        let words = Text::new(mark.text.clone(), (mark.at_s, most_y * 1.2), (FONT, 12));
        chart.draw_series([words]).map_err(text)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
        .map_err(text)
}

/// A number of nines as a percentile: as many decimals as tell it from the next.
fn percentile_name(nines: f64) -> String {
    let decimals = (nines.ceil() as usize).saturating_sub(2);
    let whole = nines.fract() == 0.0;
    let decimals = decimals + usize::from(!whole && nines > 1.0);
    format!("{:.decimals$}", 100.0 - 100.0 * 10_f64.powf(-nines))
}

fn short(value: f64) -> String {
    if value >= 10.0 {
        format!("{value:.0}")
    } else if value >= 0.1 {
        format!("{value:.1}")
    } else {
        format!("{value:.3}")
    }
}

/// Latency by percentile: each step to the right is a further nine.
pub fn percentiles(
    path: &Path,
    title: &str,
    rows: &[(String, &Histogram<u64>)],
) -> Result<(), BenchError> {
    let series: Vec<Series> = rows
        .iter()
        .map(|(name, row)| {
            let samples = row.len() as f64;
            let nines_most = (samples / SAMPLES_BEYOND_MIN).max(1.0).log10();
            let steps = (nines_most * f64::from(POINTS_PER_NINE)) as u32;
            let points = (0..=steps).filter_map(|step| {
                let nines = f64::from(step) / f64::from(POINTS_PER_NINE);
                let value = quantile(row, 1.0 - 10_f64.powf(-nines))?;
                Some((nines, value as f64 / 1e6))
            });
            Series {
                name: name.clone(),
                points: points.collect(),
            }
        })
        .collect();
    let label = |nines: &f64| percentile_name(*nines);
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let x_name = "percentile";
    draw(path, &root, |root| {
        lines_of_times(root, title, x_name, &label, &series, &[])
    })
}

/// Latency over the rate that was asked for.
pub fn over_rate(path: &Path, title: &str, series: &[Series]) -> Result<(), BenchError> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let label = |rate: &f64| format!("{rate:.0}");
    draw(path, &root, |root| {
        lines_of_times(root, title, "messages per second", &label, series, &[])
    })
}

/// Latency and rate of every second, with marks at what was done to the machine.
pub fn timeline(
    path: &Path,
    title: &str,
    seconds: &[Second],
    marks: &[Mark],
) -> Result<(), BenchError> {
    let share = |share: f64| {
        let points = seconds.iter().enumerate().filter_map(move |(at, second)| {
            let [latency, ..] = &second.times;
            let row = latency.histogram().ok().filter(|row| !row.is_empty())?;
            let value = if share < 1.0 {
                quantile(&row, share)?
            } else {
                row.max()
            };
            Some((at as f64 + 0.5, value as f64 / 1e6))
        });
        points.collect::<Vec<_>>()
    };
    let series = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];
    let series = series.map(|(name, at)| Series {
        name: name.to_owned(),
        points: share(at),
    });
    let acked = seconds.iter().enumerate();
    let acked: Vec<(f64, f64)> = acked
        .map(|(at, second)| (at as f64 + 0.5, second.acked as f64))
        .collect();
    let root = SVGBackend::new(path, TALL).into_drawing_area();
    let label = |second: &f64| format!("{second}");
    draw(path, &root, |root| {
        let (above, below) = root.split_vertically(TALL.1 * 2 / 3);
        lines_of_times(&above, title, "seconds", &label, &series, marks)?;
        rates(&below, &acked)
    })
}

fn rates(area: &Area<'_>, points: &[(f64, f64)]) -> Result<(), String> {
    let text = |error: DrawingAreaErrorKind<_>| format!("{error:?}");
    let most_x = points.iter().map(|(x, _)| *x).fold(1.0, f64::max);
    let most_y = points.iter().map(|(_, y)| *y).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..most_x * 1.02, 0.0..most_y * 1.1)
        .map_err(text)?;
    chart
        .configure_mesh()
        .x_desc("seconds")
        .y_desc("acknowledged")
        .x_label_formatter(&|x| format!("{x}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .draw()
        .map_err(text)?;
    let line = LineSeries::new(points.iter().copied(), BLUE.stroke_width(2));
    chart.draw_series(line).map_err(text)?;
    Ok(())
}

fn draw(
    path: &Path,
    root: &Area<'_>,
    inside: impl FnOnce(&Area<'_>) -> Result<(), String>,
) -> Result<(), BenchError> {
    let failed = failed(path);
    root.fill(&WHITE)
        .map_err(|error| failed(error.to_string()))?;
    inside(root).map_err(&failed)?;
    root.present().map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Sparse, histogram, record};

    fn drawn(name: &str, draw: impl FnOnce(&Path)) -> String {
        let name = format!("pinion-bench-{name}-{}.svg", std::process::id());
        let path = std::env::temp_dir().join(name);
        draw(&path);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        text
    }

    #[test]
    fn a_timeline_shows_its_marks() {
        let seconds: Vec<Second> = (1..20)
            .map(|number| {
                let mut row = histogram::<u64>().unwrap();
                record(&mut row, number * 200_000, 100);
                Second {
                    acked: 100,
                    times: [Sparse::of(&row), Sparse::default(), Sparse::default()],
                    ..Second::default()
                }
            })
            .collect();
        let marks = [Mark {
            at_s: 5.0,
            text: "neighbour writes".to_owned(),
        }];
        let text = drawn("timeline", |path| {
            timeline(path, "a run", &seconds, &marks).unwrap();
        });
        for word in ["<svg", "neighbour writes", "p99.9", "acknowledged"] {
            assert!(text.contains(word), "{word}");
        }
        drawn("empty", |path| timeline(path, "no run", &[], &[]).unwrap());
    }

    #[test]
    fn percentiles_are_named_as_exactly_as_they_are_apart() {
        let named = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 3.5, 5.0].map(percentile_name);
        let wanted = ["0", "68", "90", "96.8", "99", "99.9", "99.968", "99.999"];
        assert_eq!(named, wanted);
    }

    #[test]
    fn curves_name_their_lines() {
        let mut row = histogram::<u64>().unwrap();
        for value in 1..10_000 {
            record(&mut row, value * 1_000, 1);
        }
        let text = drawn("curve", |path| {
            percentiles(path, "curve", &[("latency".to_owned(), &row)]).unwrap();
        });
        assert!(text.contains("latency") && text.contains("99.9"), "{text}");
        let series = [Series {
            name: "p99".to_owned(),
            points: vec![(1_000.0, 0.5), (2_000.0, 3.0)],
        }];
        let text = drawn("rates", |path| over_rate(path, "rates", &series).unwrap());
        assert!(text.contains("messages per second"));
    }
}
