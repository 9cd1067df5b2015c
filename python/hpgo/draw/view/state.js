// State that all parts of the interactive picture share. `hpgo.draw.html` joins the files of this folder into one script.
// Columns arrive packed (base64 of compressed differences) and become typed arrays. A frame draws boxes if few actions are
// in view, and shares of time otherwise, so its cost depends on the pixels and not on the actions.
"use strict";

const META = JSON.parse(document.getElementById("meta").textContent);
const { kinds, causes, marks, causeNames, kindNames, lines } = META;
const AXIS = 36, RIGHT = 14, HEAD = 24, PANEL_GAP = 12;
const CURVE_ROW_PX = 26; // smallest row height at which a memory curve is readable; rows that do not fit scroll
const PAPER_PX = 720; // width of A4 and Letter between their margins
const MAX_BOXES = 20000, MAX_ARROWS = 5000, OVERVIEW_CELLS = 2 ** 21;
const byId = (id) => document.getElementById(id);
const canvas = byId("canvas"), context = canvas.getContext("2d", { alpha: false }), tip = byId("tip");
const show = { ...META.show };
const view = { t0: 0, t1: META.end_s || 1, top: 0, rowPx: 20 };
let GUTTER = 60, guttered = 0; // grows with the longest row name
let width = 0, height = 0, ratio = 1, timelines = [], hover = null, dirty = false, dark = false;

// Read by the page's tests, and useful in the browser's console.
const state = window.hpgo = { ready: false, modes: [], visible: 0, frame_ms: 0, hover: null, show, view, zoomTo, place, arrows: 0, kept, restore };

// Return the canvas position of a rank of a timeline at a time.
function place(number, rank, time_s) { return [xOf(time_s), panels()[number].top + rank * view.rowPx + strips().box / 2]; }
