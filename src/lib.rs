//! The Rust core of hpgo: cuts of a model, costs of stages, searches for plans, and simulation of schedules.
//!
//! A module imports only from modules above it in this list. Only `python` depends on Python.

pub mod error;

pub mod control;

pub mod model;

pub mod cost;

pub mod schedule;

pub mod simulate;

pub mod planner;

#[cfg(feature = "python")]
mod python;

pub use control::Control;
pub use error::{Error, Result};
