//! Line plots as inline SVG. Colours are classes: the page's style gives them for light and dark.

use crate::page::escape;
use std::fmt::Write as _;

/// Width of a plot in SVG units, labels included.
const WIDTH: f64 = 560.0;
/// Height of a plot.
const HEIGHT: f64 = 240.0;
/// Room for labels to the left.
const LEFT: f64 = 52.0;
/// Room for labels below.
const BELOW: f64 = 34.0;
/// Room above and to the right.
const EDGE: f64 = 12.0;
/// Ticks wanted on a linear axis.
const TICKS: f64 = 5.0;
/// Decades from which on every tick of a logarithmic axis is a power of ten.
const DECADES_FULL: f64 = 2.5;

/// One line: name, class of its colour, and points. A point without a value breaks the line.
pub(super) struct Line {
    pub(super) name: &'static str,
    pub(super) class: &'static str,
    pub(super) points: Vec<(f64, Option<f64>)>,
}

/// How an axis maps values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    /// From 0 to the greatest.
    Linear { max: f64 },
    /// From the least to the greatest, both above 0.
    Logarithmic { min: f64, max: f64 },
}

/// A plot with its title, units of both axes, and lines.
pub(super) struct Plot {
    pub(super) title: &'static str,
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    /// Whether x, which then is above 0, is spread by its logarithm.
    pub(super) logarithmic: bool,
    /// The end of y where it is known, such as 1 of a share.
    pub(super) y_max: Option<f64>,
    pub(super) lines: Vec<Line>,
}

impl Plot {
    /// The plot as a figure. One without any value says so.
    pub(super) fn draw(&self) -> String {
        let mut out = format!("<figure><figcaption>{}</figcaption>", escape(self.title));
        let shown = || self.lines.iter().flat_map(|line| &line.points).filter_map(|&(x, y)| Some((x, y?)));
        if shown().next().is_none() {
            out.push_str("<p>nothing was measured</p></figure>");
            return out;
        }
        let x = Scale::of(shown().map(|(x, _)| x), self.logarithmic, None);
        let y = Scale::of(shown().map(|(_, y)| y), false, self.y_max);
        // Writing into a String cannot fail.
        let _ =
            write!(out, "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">", escape(self.title));
        self.axes(x, y, &mut out);
        self.lines.iter().for_each(|line| draw(line, x, y, &mut out));
        out.push_str("</svg><p class=\"legend\">");
        for line in &self.lines {
            let _ = write!(out, "<span class=\"{}\">{}</span>", line.class, escape(line.name));
        }
        out.push_str("</p></figure>");
        out
    }

    fn axes(&self, x: Scale, y: Scale, out: &mut String) {
        let (bottom, right) = (HEIGHT - BELOW, WIDTH - EDGE);
        for tick in y.ticks() {
            let at = across_y(y, tick);
            let _ = write!(out, "<path class=\"tick\" d=\"M{LEFT} {at:.1}H{right}\"/>");
            let _ =
                write!(out, "<text class=\"y\" x=\"{:.1}\" y=\"{:.1}\">{}</text>", LEFT - 6.0, at + 4.0, label(tick));
        }
        for tick in x.ticks() {
            let at = across_x(x, tick);
            let _ = write!(out, "<path class=\"tick\" d=\"M{at:.1} {EDGE}V{bottom}\"/>");
            let _ = write!(out, "<text class=\"x\" x=\"{at:.1}\" y=\"{:.1}\">{}</text>", bottom + 14.0, label(tick));
        }
        let _ = write!(out, "<text class=\"unit\" x=\"{right}\" y=\"{:.1}\">{}</text>", HEIGHT - 4.0, escape(self.x));
        let _ = write!(out, "<text class=\"unit top\" x=\"{LEFT}\" y=\"9\">{}</text>", escape(self.y));
    }
}

fn draw(line: &Line, x: Scale, y: Scale, out: &mut String) {
    let place = |&(at, value): &(f64, Option<f64>)| value.map(|value| (across_x(x, at), across_y(y, value)));
    let places: Vec<_> = line.points.iter().map(place).collect();
    let _ = write!(out, "<g class=\"line {}\"><title>{}</title>", line.class, escape(line.name));
    for run in places.split(Option::is_none).filter(|run| !run.is_empty()) {
        match run {
            // A line of one point could not be seen.
            [Some((at, value))] => {
                let _ = write!(out, "<circle cx=\"{at:.1}\" cy=\"{value:.1}\" r=\"1.5\"/>");
            }
            run => {
                let points = run.iter().flatten().map(|(at, value)| format!("{at:.1},{value:.1}"));
                let _ = write!(out, "<polyline points=\"{}\"/>", points.collect::<Vec<_>>().join(" "));
            }
        }
    }
    out.push_str("</g>");
}

impl Scale {
    fn of(values: impl Iterator<Item = f64>, logarithmic: bool, max: Option<f64>) -> Self {
        let (least, greatest) =
            values.fold((f64::INFINITY, 0.0_f64), |(least, greatest), value| (least.min(value), greatest.max(value)));
        let greatest = max.unwrap_or(greatest);
        if logarithmic && least > 0.0 && greatest > least {
            return Self::Logarithmic { min: least, max: greatest };
        }
        Self::Linear { max: if greatest > 0.0 { greatest } else { 1.0 } }
    }

    /// 0 at the beginning of the axis, 1 at its end.
    fn share(self, value: f64) -> f64 {
        match self {
            Self::Linear { max } => value / max,
            Self::Logarithmic { min, max } => (value / min).ln() / (max / min).ln(),
        }
        .clamp(0.0, 1.0)
    }

    /// Round values inside the axis.
    fn ticks(self) -> Vec<f64> {
        match self {
            Self::Linear { max } => {
                let rough = max / TICKS;
                let power = 10_f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough * 0.999);
                let step = step.unwrap_or(rough);
                (0..=(max / step * 1.0001) as usize).map(|number| number as f64 * step).collect()
            }
            Self::Logarithmic { min, max } => {
                let mantissas: &[f64] = if (max / min).log10() > DECADES_FULL { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let decades = min.log10().floor() as i32..=max.log10().ceil() as i32;
                let all = decades.flat_map(|decade| mantissas.iter().map(move |m| m * 10_f64.powi(decade)));
                all.filter(|tick| (min..=max).contains(tick)).collect()
            }
        }
    }
}

fn across_x(scale: Scale, value: f64) -> f64 {
    LEFT + scale.share(value) * (WIDTH - EDGE - LEFT)
}

fn across_y(scale: Scale, value: f64) -> f64 {
    HEIGHT - BELOW - scale.share(value) * (HEIGHT - BELOW - EDGE)
}

/// A tick without digits that say nothing.
fn label(value: f64) -> String {
    let text = format!("{value:.3}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(Scale::Linear { max: 1.0 }.ticks().len(), 6);
        assert_eq!(Scale::Linear { max: 47.0 }.ticks(), [0.0, 10.0, 20.0, 30.0, 40.0]);
        assert_eq!(Scale::Linear { max: 0.03 }.ticks().len(), 4);
        assert_eq!(Scale::Logarithmic { min: 15.0, max: 210.0 }.ticks(), [20.0, 50.0, 100.0, 200.0]);
        assert_eq!(Scale::Logarithmic { min: 0.5, max: 20_000.0 }.ticks(), [1.0, 10.0, 100.0, 1_000.0, 10_000.0]);
        assert_eq!([0.2, 10.0, 1_000.0, 0.0].map(label), ["0.2", "10", "1000", "0"]);
    }

    #[test]
    fn axes_fit_what_there_is() {
        assert_eq!(Scale::of([5.0, 9.0].into_iter(), false, None), Scale::Linear { max: 9.0 });
        assert_eq!(Scale::of([0.0].into_iter(), false, None), Scale::Linear { max: 1.0 });
        assert_eq!(Scale::of([5.0, 5.0].into_iter(), true, None), Scale::Linear { max: 5.0 });
        assert_eq!(Scale::of([1.0, 100.0].into_iter(), true, None).share(10.0), 0.5);
    }

    #[test]
    fn points_stand_at_their_values_and_gaps_stay_open() {
        let line = |points| Line { name: "p50 <of> all", class: "a", points };
        let plot =
            |points| Plot { title: "T", x: "s", y: "ms", logarithmic: false, y_max: None, lines: vec![line(points)] };
        let drawn = plot(vec![(0.0, Some(0.0)), (1.0, Some(10.0)), (2.0, None), (4.0, Some(5.0))]).draw();
        // 52 to 548 across, 206 to 12 upwards.
        assert!(
            drawn.contains("<polyline points=\"52.0,206.0 176.0,12.0\"/><circle cx=\"548.0\" cy=\"109.0\""),
            "{drawn}"
        );
        assert!(drawn.contains("p50 &lt;of&gt; all") && !drawn.contains("<of>"), "{drawn}");
        assert!(plot(vec![(0.0, None)]).draw().contains("nothing was measured"));
    }
}
