//! The page's routes.
