// The rules about static shapes, as functions of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace jgg {

void DefineRules(nanobind::module_& m);

}  // namespace jgg
