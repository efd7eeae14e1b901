//! What operators start, set, read and ask: `baton`'s verbs, settings, images, metrics and traces.

mod bench;
mod configuration;
mod doctor;
mod first_use;
mod images;
mod jaeger;
mod kv_size;
mod metric_values;
mod metrics;
mod status;
mod traces;
mod up;
