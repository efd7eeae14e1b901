//! Line plots as inline SVG. Plotters draws with [`COLOURS`]; the page's style replaces them for light and dark schemes.

use crate::page::escape;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use std::fmt::Write as _;

/// Width and height of a plot in SVG units, labels included.
const SIZE: (u32, u32) = (560, 240);
/// Margin for labels on the left.
const LEFT: u32 = 52;
/// Margin for labels below.
const BELOW: u32 = 34;
/// Margin above and on the right.
const EDGE: u32 = 12;
/// Ticks of an axis, at most.
const TICKS: usize = 6;
/// Colours of a plot's first and second line, with the class that names them in the page's style.
const COLOURS: [(&str, RGBColor); 2] = [("a", BLUE), ("b", RED)];

/// One line: its name and points. A point without a value interrupts it.
pub(super) struct Line {
    pub(super) name: &'static str,
    pub(super) points: Vec<(f64, Option<f64>)>,
}

/// A plot with its title, units of both axes, and at most two lines.
pub(super) struct Plot {
    pub(super) title: &'static str,
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    /// Whether x, which then is above 0, has a logarithmic scale.
    pub(super) logarithmic: bool,
    /// The upper end of y if it is known, such as 1 for a share.
    pub(super) y_max: Option<f64>,
    pub(super) lines: Vec<Line>,
}

impl Plot {
    /// The plot as a figure. A plot without any value says so.
    pub(super) fn figure(&self) -> String {
        let mut out = format!("<figure><figcaption>{}</figcaption>", escape(self.title));
        let shown = || self.lines.iter().flat_map(|line| &line.points).filter_map(|&(x, y)| Some((x, y?)));
        let greatest = |of: fn((f64, f64)) -> f64| shown().map(of).fold(0.0, f64::max);
        let (least, most) = (shown().map(|(x, _)| x).fold(f64::INFINITY, f64::min), greatest(|(x, _)| x));
        let end = |value: f64| if value > 0.0 { value } else { 1.0 };
        let y_max = end(self.y_max.unwrap_or_else(|| greatest(|(_, y)| y)));
        let drawn = match self.logarithmic && 0.0 < least && least < most {
            _ if shown().next().is_none() => Ok("<p>nothing was measured</p>".to_owned()),
            true => self.draw((least..most).log_scale(), y_max),
            false => self.draw(0.0..end(most), y_max),
        };
        out.push_str(&drawn.unwrap_or_else(|error| format!("<p>{}</p>", escape(&error.to_string()))));
        out.push_str("<p class=\"legend\">");
        for (line, (class, _)) in self.lines.iter().zip(COLOURS) {
            // Writing into a String cannot fail.
            let _ = write!(out, "<span class=\"{class}\">{}</span>", escape(line.name));
        }
        out.push_str("</p></figure>");
        out
    }

    fn draw<X>(&self, x: X, y_max: f64) -> Result<String, Box<dyn std::error::Error>>
    where
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
    {
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            let mut chart = ChartBuilder::on(&area);
            chart.margin(EDGE).x_label_area_size(BELOW).y_label_area_size(LEFT);
            let mut chart = chart.build_cartesian_2d(x, 0.0..y_max)?;
            let mut mesh = chart.configure_mesh();
            mesh.max_light_lines(0).x_labels(TICKS).y_labels(TICKS).x_desc(self.x).y_desc(self.y).draw()?;
            for (line, (_, colour)) in self.lines.iter().zip(COLOURS) {
                for run in line.points.split(|(_, y)| y.is_none()) {
                    let points = run.iter().filter_map(|&(x, y)| Some((x, y?)));
                    // A line of one point would be invisible.
                    chart.draw_series(
                        LineSeries::new(points, colour.stroke_width(2)).point_size(u32::from(run.len() == 1)),
                    )?;
                }
            }
            area.present()?;
        }
        // HTML does not need the namespace, and without it the page names no host.
        Ok(svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(logarithmic: bool, points: Vec<(f64, Option<f64>)>) -> String {
        let lines = vec![Line { name: "p50 <of> all", points }];
        Plot { title: "T", x: "s", y: "ms", logarithmic, y_max: None, lines }.figure()
    }

    #[test]
    fn points_stand_at_their_values_and_gaps_stay_open() {
        let drawn = plot(false, vec![(0.0, Some(0.0)), (1.0, Some(10.0)), (2.0, None), (4.0, Some(5.0))]);
        assert!(
            drawn.contains("points=\"64,193 184,12 \"") && drawn.contains("<circle cx=\"547\" cy=\"103\""),
            "{drawn}"
        );
        assert!(drawn.contains("p50 &lt;of&gt; all") && !drawn.contains("<of>"), "{drawn}");
    }

    #[test]
    fn axes_fit_what_there_is() {
        let drawn = plot(true, vec![(1.0, Some(0.0)), (10.0, Some(0.5)), (100.0, Some(1.0))]);
        assert!(drawn.contains("points=\"64,193 305,103 547,12 \""), "{drawn}");
        for flat in [plot(true, vec![(5.0, Some(1.0)), (5.0, Some(1.0))]), plot(false, vec![(0.0, Some(0.0))])] {
            assert!(flat.contains("<svg "), "{flat}");
        }
        assert!(plot(false, vec![(0.0, None)]).contains("nothing was measured"));
    }
}
