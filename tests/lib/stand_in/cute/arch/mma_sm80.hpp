#include "../layout.hpp"
