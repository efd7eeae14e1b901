//! The metrics of a process, read from `/metrics`.

use anyhow::Context;

/// One reading.
#[derive(Clone, Debug)]
pub struct Scrape(String);

impl Scrape {
    /// Reads `url`, which ends in `/metrics`.
    pub async fn of(url: &str) -> anyhow::Result<Self> {
        Self::read(url, reqwest::Client::new().get(url)).await
    }

    /// The same with this API key.
    pub async fn with_key(url: &str, key: &str) -> anyhow::Result<Self> {
        Self::read(url, reqwest::Client::new().get(url).bearer_auth(key)).await
    }

    async fn read(url: &str, request: reqwest::RequestBuilder) -> anyhow::Result<Self> {
        let request = request.header("accept", "application/openmetrics-text");
        let answer = request.send().await.with_context(|| format!("nobody answers at {url}"))?;
        Ok(Self(answer.error_for_status()?.text().await?))
    }

    /// A text that was read elsewhere.
    pub fn from_text(text: String) -> Self {
        Self(text)
    }

    /// The reading itself.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Sum of the series of `name` whose labels contain all of `labels` (`state="free"`, or a part of it). It is 0 if there are none, as
    /// for a counter that has not started.
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        self.series(name, labels).sum()
    }

    /// The same if there must be at least one.
    pub fn find(&self, name: &str, labels: &[&str]) -> anyhow::Result<f64> {
        let any = self.series(name, labels).next().is_some();
        any.then(|| self.sum(name, labels)).with_context(|| format!("no {name} with {labels:?} in:\n{}", self.0))
    }

    fn series<'a>(&'a self, name: &'a str, labels: &'a [&'a str]) -> impl Iterator<Item = f64> + 'a {
        self.0.lines().filter_map(move |line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (called, labelled) = series.split_once('{').unwrap_or((series, ""));
            let fits = called == name && labels.iter().all(|label| labelled.contains(label));
            fits.then(|| value.parse().ok()).flatten()
        })
    }
}

/// [`Scrape::sum`] of one reading.
pub async fn sum(url: &str, name: &str, labels: &[&str]) -> anyhow::Result<f64> {
    Ok(Scrape::of(url).await?.sum(name, labels))
}

/// [`Scrape::find`] in one reading.
pub async fn find(url: &str, name: &str, labels: &[&str]) -> anyhow::Result<f64> {
    Scrape::of(url).await?.find(name, labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_found_by_their_whole_name_and_their_labels() {
        let text = "# TYPE a_b counter\na_b_total{x=\"1\",y=\"p q\"} 2\na_b_total{x=\"2\"} 3.5\na_b 7\na_b_totals{x=\"1\"} 100\n# EOF\n";
        let scrape = Scrape(text.into());
        assert_eq!(scrape.sum("a_b_total", &[]), 5.5);
        assert_eq!(scrape.sum("a_b_total", &["x=\"1\"", "y=\"p q"]), 2.0);
        assert_eq!(scrape.sum("a_b", &[]), 7.0);
        assert_eq!(scrape.sum("a_c", &[]), 0.0);
        assert!(scrape.find("a_c", &[]).is_err() && scrape.find("a_b", &["x"]).is_err());
        assert_eq!(scrape.find("a_b_total", &["x=\"2\""]).unwrap(), 3.5);
    }
}
