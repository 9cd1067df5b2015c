//! The Rust half of `hpgo`: it decides where a model is cut, prices stages, searches plans, and runs schedules.
//!
//! Modules import only from modules above them in this list; `python` alone knows that Python exists.

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
