//! Few numbers out of many.

use hdrhistogram::Histogram;

/// The middle of `values`, not empty.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// The largest of `values`. Right for rates, where whatever else runs can only take away.
pub(crate) fn best(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(0.0, f64::max)
}

/// Times in nanoseconds, to three digits.
pub(crate) fn histogram(seconds: &[f64]) -> anyhow::Result<Histogram<u64>> {
    let mut times = Histogram::new(3)?;
    seconds.iter().try_for_each(|seconds| times.record((seconds * 1e9) as u64))?;
    Ok(times)
}

/// Median of the quotients of two series whose values were measured in pairs.
pub(crate) fn paired_ratio(ours: &[f64], theirs: &[f64]) -> f64 {
    median(ours.iter().zip(theirs).map(|(a, b)| a / b).collect())
}

/// The lower end of the 90% interval of the ratio of two series whose five values were measured in pairs: what one run shows that `ours` is
/// at least, times `theirs`.
pub(crate) fn paired_ratio_at_least(ours: &[f64], theirs: &[f64]) -> f64 {
    // Student's t with 4 degrees of freedom, 95th percentile.
    const T: f64 = 2.132;
    assert_eq!((ours.len(), theirs.len()), (5, 5), "the quantile is that of 5 pairs");
    // Ratios are compared by their logarithms, whose mean does not depend on which series is above.
    let logarithms: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| (a / b).ln()).collect();
    let mean = mean(&logarithms);
    let variance = logarithms.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 4.0;
    (mean - T * (variance / 5.0).sqrt()).exp()
}

/// The mean of `values`, not empty.
pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The upper end of the 90% interval of the mean of 15 values: what one run shows that the mean is at most.
pub(crate) fn mean_at_most(values: &[f64]) -> f64 {
    // Student's t with 14 degrees of freedom, 95th percentile.
    const T: f64 = 1.761;
    assert_eq!(values.len(), 15, "the quantile is that of 15 values");
    let (mean, count) = (mean(values), values.len() as f64);
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    mean + T * (variance / count).sqrt()
}
